"""Which tiny network stands for a file of a stock workflow, by the file's name, with the text, the VAE and the vision
encoder that belong to it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from ..zoo.networks import POOLED_SD3
from ..zoo.unets import TEXT
from .conditioning import SAMPLED, WITHOUT_PLAN, text_of_unet
from .graphs import TEXTS

OF_THE_ENCODER = ("pooled", "mask_valid")  # what a text encoder makes beside the text, and what begins so
TENSORS_OF_THE_ENCODER = ("conditioning_", "attention_mask_")
# Numbers a token of what a vision encoder sees; 1280 otherwise.
VISION = {"unet_svd": TEXT, "hunyuan_3d": 96, "hunyuan_3d_21": 96, "hunyuan_15": 48}
HEARD = {"wan_s2v": (24, 48), "humo": (32, 1280)}  # layers and numbers of what an audio encoder heard; 12 and 768 else


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A tiny network: its `file` in the folder diffusion_models, and what a text encoder makes for it."""

    file: str
    text: dict[str, Any]

    @property
    def name(self) -> str:
        return self.file.rpartition("/")[2].removesuffix(".safetensors")

    @property
    def vision(self) -> int:
        return VISION.get(self.name, 1280)


UNSUPPORTED = {  # no tiny network of these: by a pattern of the file's name
    r"minimax_music": "ComfyUI fixes the widths of MiniMaxMusic3DiT: no file of it is tiny",
    r"ace_?step_v1_": "ComfyUI fixes the width of ACEStepTransformer2DModel's encoder of lyrics: no file of it is tiny",
    r"sam3|depth_anything|moge": "no network that samples",
}
FILES: tuple[tuple[str, str], ...] = (  # by a pattern of the file's name, the first that fits: the tiny network
    (r"hidream_o1", "hidream_o1"), (r"hidream", "hidream"), (r"^pid_", "pid"), (r"pixeldit", "pixeldit"),
    (r"chroma.?radiance", "chroma_radiance"), (r"chroma", "chroma"), (r"krea.?2", "krea2"),
    (r"qwen.image|firered", "family qwen_image"), (r"z_image", "family z_image"),
    (r"newbie|netayume|lumina", "lumina2"),
    (r"anima-|anima_", "anima"), (r"wan.?animate.?2|animate_2", "wan_animate_2"), (r"wan.*animate", "wan_animate"),
    (r"seedvr2", "seedvr2"), (r"scail_?2", "wan_scail_2"),
    (r"scail", "wan_scail"),
    (r"s2v", "wan_s2v"), (r"humo", "humo"), (r"dancer", "wandancer"), (r"vace", "wan_vace"),
    (r"wan2.2.*camera", "wan22_camera"), (r"wan.*camera", "wan_camera"),
    (r"wan2.2_fun_control_5b", "wan22_fun_control_5b"), (r"wan2.2.*fun_control", "wan22_fun_control"),
    (r"fun_control|fun.control", "wan_fun_control"), (r"causal_forcing|self_forcing", "causal_wan"),
    (r"flf2v", "wan_first_and_last_frame"), (r"wan2_1-i2v", "wan_talking_i2v"),
    (r"ti2v|wan2.2.*5b", "wan_5b"),
    (r"wan2.2_(i2v|fun_inp)", "wan22_i2v"), (r"i2v.*wan|wan.*(i2v|inp|move)|chrono_edit", "wan_i2v"),
    (r"wan", "wan_phantom"), (r"void_pass", "cogvideox"), (r"minimax_h3", "minimax_h3"),
    (r"hunyuan.?3d.*2\.1", "hunyuan_3d_21"), (r"hunyuan.?3d", "hunyuan_3d"),
    (r"hunyuanvideo1\.5.*sr|capybara|hunyuanvideo1\.5", "hunyuan_15"), (r"hunyuan_?video", "hunyuan_i2v"),
    (r"kandinsky5.*t2i", "kandinsky5_image"), (r"kandinsky5", "kandinsky5"), (r"ernie.image", "ernie_image"),
    (r"boogu", "boogu"), (r"omnigen2", "omnigen2"), (r"lens", "lens"), (r"ideogram4", "ideogram4"),
    (r"mage_flow", "mage_flow"), (r"joyai", "joyimage"), (r"ltx-2", "ltx2"), (r"ltx", "ltxv"),
    (r"ace_?step", "ace_step_15"), (r"stable_audio_3", "stable_audio_3"), (r"stable.audio", "stable_audio"),
    (r"triposplat", "triposplat"), (r"sd3", "control sd35"), (r"flux.?2.*klein", "flux2_klein"), (r"flux.?2", "flux2"),
    (r"flux.*fill", "flux_fill"), (r"flux1-(canny|depth)-dev\.", "flux_depth"), (r"schnell", "family flux_schnell"),
    (r"longcat", "longcat"), (r"ovis", "ovis"), (r"flux", "family flux_dev"), (r"refiner", "unet unet_refiner"),
    (r"svd", "unet unet_svd"), (r"lotus", "unet unet_lotus"), (r"sd_?xl", "unet unet_xl"),
)  # fmt: skip
PLAIN = {"dim": 96, "tokens": 7}


def tiny_of(file: str) -> Tiny:
    """Raises LookupError, with the reason, where no tiny network stands for a file of this name."""
    name = os.path.basename(file.replace("\\", "/")).lower()
    for pattern, reason in UNSUPPORTED.items():
        if re.search(pattern, name):
            raise LookupError(reason)
    tiny_file = next((tiny for pattern, tiny in FILES if re.search(pattern, name)), "")
    if not tiny_file:
        raise LookupError(f"the tests know no network for {name}")
    kind, _, tiny = tiny_file.rpartition(" ")
    if kind == "family":
        text = {key: value for key, value in TEXTS.get(tiny, {}).items() if key != "guidance"}
        return Tiny(file=f"{tiny}.safetensors", text=PLAIN | text)
    if kind == "unet":
        return Tiny(file=f"unets/{tiny}.safetensors", text=PLAIN | text_of_unet(tiny))
    if kind == "control":
        return Tiny(file=f"control/{tiny}.safetensors", text=PLAIN | {"pooled": POOLED_SD3})
    return Tiny(file=f"networks/{tiny}.safetensors", text=_text(tiny))


def _text(name: str) -> dict[str, Any]:
    """The part of a network's conditioning that a text encoder makes; nodes of the workflow make the others."""
    network = (SAMPLED | WITHOUT_PLAN)[name]
    spec = network.spec(network.tokens)
    text = {key: spec[key] for key in ("tokens", "dim", *OF_THE_ENCODER) if key in spec}
    tensors = {key: shape for key, shape in spec.get("tensors", {}).items() if key.startswith(TENSORS_OF_THE_ENCODER)}
    numbers = {key: values for key, values in spec.get("numbers", {}).items() if key == "text_input_ids"}
    return text | ({"tensors": tensors} if tensors else {}) | ({"numbers": numbers} if numbers else {})


VAES: tuple[tuple[str, Any], ...] = (  # by a pattern of its file's name: a tiny file, or (channels, pixels, frames)
    (r"seedvr2", (16, 8, 4)),
    (r"pixel_space", "pixel_space"), (r"flux2|full_encoder", (128, 16, 1)), (r"mage_flow", (128, 16, 1)),
    (r"vae-ft-mse|sd_?xl|lotus", "taesd"), (r"hunyuanvideo15", (32, 16, 4)), (r"hunyuan_video", (16, 8, 4)),
    (r"wan2.2_vae", (48, 16, 4)), (r"qwen|wan", "wan.safetensors"), (r"cogvideox", (16, 8, 4)),
    (r"svd", (4, 8, 1)), (r"minimax_h3_video", (24, 16, 4)), (r"ltx.*audio|minimax_h3_audio", (8, 0, 16)),
    (r"ltx", (128, 32, 8)), (r"stable_audio_3", (256, 0, 0)), (r"stable.audio|ace", (64, 0, 0)),
    (r"ae\.|flux|sd3|ovis|neta", "taef1"), (r"hidream_o1", "pixel_space"), (r"triposplat|hunyuan.?3d", (64, 8, 1)),
)  # fmt: skip
CONTROL_NETS = ((r"fun", "qwen_fun"), (r"qwen", "qwen_union"), (r"sd3", "sd35_canny"))
PATCHES = (
    (r"uso", "uso_style"), (r"anima", "anima_lllite"), (r"qwen.*canny", "qwen_canny"), (r"qwen.*depth", "qwen_depth"),
    (r"qwen.*inp", "qwen_inpaint"), (r"z-image|z_image", "z_image_fun"), (r"infinitetalk", "infinite_talk"),
)  # fmt: skip


def matching(table: tuple[tuple[str, Any], ...], file: str) -> Any:
    """Raises LookupError where no pattern of the table fits this file's name."""
    name = os.path.basename(file.replace("\\", "/")).lower()
    for pattern, replacement in table:
        if re.search(pattern, name):
            return replacement
    raise LookupError(f"the tests have nothing tiny for {name}")
