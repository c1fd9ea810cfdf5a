"""What each network of the zoo is sampled with, from its file: its latent, and the conditioning its users give it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..zoo.unets import POOLED as POOLED_OF_UNETS
from ..zoo.unets import POOLED_XL, TEXT, UNET_FILES
from .client import Graph
from .graphs import Job, Parallel, sampling_graph

JOB = Job(family="flux_dev", cfg=2.0, steps=3, latent_seed=4)


@dataclass(frozen=True, kw_only=True)
class Conditioning:
    """`latent` are the sides after the batch, of each part, `dim` and `tokens` those of the text."""

    latent: tuple[tuple[int, ...], ...]
    dim: int
    tokens: int
    batch: int
    more: dict[str, Any]

    @property
    def shape(self) -> str:
        return ";".join(",".join(map(str, (self.batch, *sides))) for sides in self.latent)

    def spec(self, tokens: int) -> dict[str, Any]:
        return {"tokens": tokens, "dim": self.dim, **self.more}


IMAGE, STILL, FLUX2_SIZE = (16, 17, 23), (16, 1, 17, 23), (128, 9, 13)
FRAMES, VIDEO = (16, 3, 9, 14), (16, 3, 10, 14)
POOLED, ALL_VALID = {"pooled": 64}, {"mask_valid": 99}


def tensors(**shapes: Any) -> dict[str, Any]:
    return {"tensors": shapes}


def references(*shapes: tuple[int, ...], method: str = "") -> dict[str, Any]:
    return tensors(reference_latents=shapes) | ({"values": {"reference_latents_method": method}} if method else {})


def drawn(*shape: int) -> dict[str, Any]:
    return {"drawn": shape}


def at(*latent: tuple[int, ...], dim: int = 96, tokens: int = 7, batch: int = 2, **more: Any) -> Conditioning:
    return Conditioning(latent=latent, dim=dim, tokens=tokens, batch=batch, more=more)


MINIMAX_H3 = (24, 7, 5, 7), (32, 2, 37)  # 22 frames with sound
KEYFRAMES = [  # the first frame, a clip with its sound within, the last; of sides that patches of 2 x 2 fill
    {"resolved_frame_index": 0, "latent": drawn(1, 24, 1, 6, 8)},
    {"resolved_frame_index": 6, "latent": drawn(1, 24, 2, 6, 8), "audio_latent": drawn(1, 32, 2, 9)},
    {"resolved_frame_index": 21, "latent": drawn(1, 24, 1, 6, 8)},
]
PICTURE = {"kind": "image", "latent_h": 4, "latent_w": 6, "latent": drawn(1, 24, 1, 4, 6)}
FILM = {"kind": "video_audio", "latent_t": 2, "latent_h": 4, "latent_w": 4, "ref_audio_t": 9}
REFERENCES = [  # of each kind
    PICTURE,
    FILM | {"latent": drawn(1, 24, 2, 4, 4), "audio_latent": drawn(1, 32, 2, 9)},
    {"kind": "audio", "ref_audio_t": 5, "audio_latent": drawn(1, 32, 2, 5)},
]
TAGS = {"numbers": {"minimax_token_tags": [[1, 0, 0, 1, 2, 1, 1, 1, 1, 0, 0, 1]]}}  # of text, a picture, sound
SEEN = {"seen": (1, 257, 1280)}
SAMPLED: dict[str, Conditioning] = {
    "flux_fill": at(IMAGE, **POOLED | tensors(concat_latent_image=(1, 16, 17, 23))),
    "flux_depth": at(IMAGE, **POOLED | tensors(concat_latent_image=(1, 16, 17, 23))),
    "flux_kontext": at(IMAGE, **POOLED | references((1, 16, 11, 13), (1, 16, 8, 6))),
    "flux_uso": at(IMAGE, **POOLED | references((1, 16, 11, 13), (1, 16, 8, 6), method="uxo")),
    "flux_redux": at(IMAGE, **POOLED | tensors(attention_mask=(1, 7 + 108, 7 + 108))),
    "flux2": at(FLUX2_SIZE, tokens=512),
    "flux2_references": at(FLUX2_SIZE, tokens=512, **references((1, 128, 5, 6))),
    "flux2_klein": at(FLUX2_SIZE, tokens=512, **references((1, 128, 5, 6))),
    "longcat": at(IMAGE),
    "ovis": at(IMAGE),
    "chroma": at(IMAGE),
    "wan_i2v": at(FRAMES, **SEEN | tensors(concat_latent_image=(1, 16, *FRAMES[1:]))),
    "wan_first_and_last_frame": at(
        FRAMES, **{"seen": (1, 514, 1280)} | tensors(concat_latent_image=(1, 16, *FRAMES[1:]))
    ),
    "wan_5b": at((48, 3, 9, 14)),
    "wan_vace": at(
        VIDEO,
        **tensors(vace_frames=[(1, 32, 3, 10, 14), (1, 32, 3, 10, 14)], vace_mask=[(1, 64, 3, 10, 14)] * 2)
        | {"values": {"vace_strength": [1.0, 0.7]}},
    ),
    "wan_camera": at(
        VIDEO, **SEEN | tensors(camera_conditions=(1, 24, 3, 80, 112), concat_latent_image=(1, 16, 3, 10, 14))
    ),
    "wan_fun_control": at(
        VIDEO, **SEEN | tensors(concat_latent_image=(1, 32, 3, 10, 14), reference_latents=[(1, 16, 1, 10, 14)])
    ),
    "wan22_i2v": at(VIDEO, **tensors(concat_latent_image=(1, 16, 3, 10, 14))),
    "wan22_camera": at(VIDEO, **tensors(camera_conditions=(1, 24, 3, 80, 112), concat_latent_image=(1, 16, 3, 10, 14))),
    "wan22_fun_control": at(
        VIDEO, **tensors(concat_latent_image=(1, 32, 3, 10, 14), reference_latents=[(1, 16, 1, 10, 14)])
    ),
    "wan22_fun_control_5b": at(
        (48, 3, 10, 14), **tensors(concat_latent_image=(1, 96, 3, 10, 14), reference_latents=[(1, 48, 1, 10, 14)])
    ),
    "wan_talking_i2v": at(VIDEO, **SEEN | tensors(concat_latent_image=(1, 16, 3, 10, 14))),
    "wan_talking": at(VIDEO),
    "wan_phantom": at(FRAMES, **tensors(time_dim_concat=(1, 16, 2, 9, 14))),
    "qwen_edit": at(STILL, **references((1, 16, 1, 11, 13))),
    "qwen_edit_2511": at(STILL, **references((1, 16, 1, 11, 13), (1, 16, 1, 8, 6), method="index_timestep_zero")),
    "z_image": at(IMAGE),
    "lumina2": at(IMAGE, mask_valid=5),
    "sd35_large": at(IMAGE, **POOLED),
    "sd35_medium": at(IMAGE, **POOLED),
    "hunyuan_i2v": at((16, 3, 6, 10), batch=1, **POOLED | {"mask_valid": 5} | tensors(ref_latent=(1, 16, 1, 6, 10))),
    "hunyuan_15": at(
        (32, 3, 5, 7),
        **POOLED
        | {"seen": (1, 12, 48)}
        | tensors(conditioning_byt5small=(1, 9, 1472), concat_latent_image=(1, 32, 3, 5, 7)),
    ),
    "ltxv": at((128, 3, 3, 5), mask_valid=5),
    "ltx2": at((128, 3, 3, 5), (8, 11, 16), dim=192),
    "hidream": at(IMAGE, **POOLED | tensors(conditioning_llama3=(1, 3, 11, 80))),
    "cosmos_predict2": at(STILL),
    "anima": at(STILL, dim=1024),
    "kandinsky5": at(VIDEO, **POOLED),
    "kandinsky5_image": at((16, 17, 23), **POOLED),
    "omnigen2": at(IMAGE, **ALL_VALID | references((1, 16, 8, 11))),
    "boogu": at(IMAGE, **ALL_VALID | references((1, 16, 8, 11))),
    "ernie_image": at(FLUX2_SIZE),
    "krea2": at(STILL, dim=192),
    "joyimage": at(STILL, **references((1, 16, 1, 8, 11))),
    "cogvideox": at(FRAMES),
    "lens": at(FLUX2_SIZE, dim=192, tokens=24, mask_valid=11),
    "wan_scail": at(
        FRAMES, **SEEN | tensors(reference_latents=[(1, 16, 1, 9, 14)], pose_video_latent=(1, 16, 3, 5, 7))
    ),
    "wan_scail_2": at(
        FRAMES,
        **SEEN
        | {"values": {"ref_mask_flag": False}}
        | tensors(
            reference_latents=[(1, 16, 1, 9, 14)],
            pose_video_latent=(1, 16, 3, 5, 7),
            ref_mask_28ch=(1, 4, 28, 9, 14),
            driving_mask_28ch=(1, 3, 28, 5, 7),
        ),
    ),
    "wan_animate": at(
        VIDEO, **SEEN | tensors(pose_video_latent=(1, 16, 2, 10, 14), concat_latent_image=(1, 16, 3, 10, 14))
    ),
    "wan_s2v": at(
        VIDEO,
        **tensors(
            audio_embed=(1, 25, 48, 12),
            reference_latents=[(1, 16, 1, 10, 14)],
            reference_motion=(1, 16, 19, 10, 14),
            control_video=(1, 16, 3, 10, 14),
        ),
    ),
    "humo": at(VIDEO, **tensors(audio_embed=(1, 3, 8, 5, 1280), reference_latents=[(1, 16, 1, 10, 14)])),
    "wandancer": at(
        (16, 3, 10, 16),
        **SEEN
        | {"values": {"fps": 15, "audio_inject_scale": 0.8}}
        | tensors(audio_embed=(1, 10, 35), concat_latent_image=(1, 16, 3, 10, 16)),
    ),
    "chroma_radiance": at((3, 36, 44)),
    "aura_flow": at((4, 17, 23)),
    "pixart": at((4, 34, 46)),
    "hunyuan_dit": at(
        (4, 17, 23),
        tokens=12,
        **{"mask_valid": 5} | tensors(conditioning_mt5xl=(1, 9, 128), attention_mask_mt5xl=(1, 9)),
    ),
    "hunyuan_3d": at((64, 35)),
    "hunyuan_3d_21": at((64, 35)),
    "triposplat": at((37, 16), (1, 5), tokens=23, **references((1, 128, 3, 6))),
    "mage_flow": at(FLUX2_SIZE, **ALL_VALID | references((1, 128, 5, 6))),
    "z_image_pixels": at((3, 33, 45)),
    "ideogram4": at(FLUX2_SIZE, mask_valid=5),
    "pixeldit": at((3, 33, 45)),
    "pid": at((3, 33, 45), **{"numbers": {"degrade_sigma": [0.4]}} | tensors(lq_latent=(1, 16, 5, 6))),
    "cosmos1": at(VIDEO),
    "mochi": at((12, 3, 10, 14), tokens=24, mask_valid=5),
    "minimax_h3": at((24, 3, 5, 7), (32, 2, 11), batch=1),
    "minimax_h3_keyframes": at(*MINIMAX_H3, tokens=12, batch=1, **TAGS | {"values": {"minimax_keyframes": KEYFRAMES}}),
    "minimax_h3_references": at(*MINIMAX_H3, tokens=12, batch=1, **TAGS | {"values": {"minimax_refs": REFERENCES}}),
    "causal_wan": at(FRAMES),
    "ace_step_15": at(
        (64, 35), **tensors(conditioning_lyrics=(1, 9, 96), reference_audio_timbre_latents=[(1, 64, 40)])
    ),
    "stable_audio": at((64, 37), dim=768),
    "stable_audio_3": at((256, 37), dim=768),
    "hidream_o1": at((3, 160, 224), **{"numbers": {"text_input_ids": [[11, 12, 13, 14, 15, 16, 17, 151673]]}}),
    "stage_c": at((16, 13, 9), dim=24, pooled=24),
    "stage_b": at((4, 32, 24), dim=24, **{"pooled": 24} | tensors(stable_cascade_prior=(1, 16, 3, 4))),
}
WITHOUT_PLAN: dict[str, Conditioning] = {
    "wan_animate_2": at(
        VIDEO, **SEEN | tensors(pose_video_latent=(1, 16, 3, 10, 14), concat_latent_image=(1, 16, 3, 10, 14))
    ),
    "seedvr2": at(VIDEO, dim=5120, tokens=58),
}
POOLED_OF = {"unet_xl": POOLED_XL, "unet_refiner": TEXT}  # POOLED_OF_UNETS of the others
BY_ROWS = ("stage_c", "stage_b")  # of which there are no stages of a pipeline


def text_of_unet(name: str) -> dict[str, int]:
    """What a text encoder makes for a UNet of a file."""
    return {"dim": UNET_FILES[name].config["context_dim"], "pooled": POOLED_OF.get(name, POOLED_OF_UNETS)}


def picture(name: str, parallel: Parallel | None = None) -> Graph:
    """A graph that samples it, natively or divided; its file is one of tests/zoo/files.py."""
    network = SAMPLED[name]
    graph = sampling_graph(JOB, "CPSampler" if parallel else "KSampler", parallel)
    graph["model"]["inputs"]["unet_name"] = f"networks/{name}.safetensors"
    for text, tokens in ("positive", network.tokens), ("negative", max(network.tokens, 12)):
        graph[text]["inputs"]["spec"] = json.dumps(network.spec(tokens))
    graph["latent"]["inputs"]["shape"] = network.shape
    return graph
