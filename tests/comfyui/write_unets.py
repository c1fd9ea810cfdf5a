"""Writes tiny UNets, and what is made for them, into a folder of models: `python -m tests.comfyui.write_unets MODELS`,
in ComfyUI's python."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..zoo.tiny import filled, start_comfyui

WIDTH, TEXT, POOLED = 32, 64, 32  # channels, numbers a token of text, numbers of its pooled output
POOLED_XL = 1280  # as in SDXL's own files: ComfyUI adds noise to what CLIP vision saw in this width
SHAPE: dict[str, Any] = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "num_res_blocks": [1, 1], "channel_mult": (1, 2),
    "transformer_depth": [1, 1], "transformer_depth_output": [1, 1, 1, 1], "transformer_depth_middle": 1,
    "num_heads": 8, "num_head_channels": -1, "disable_self_attentions": None,
    "use_spatial_transformer": True, "use_linear_in_transformer": True, "legacy": False,
    "model_channels": WIDTH, "context_dim": TEXT,
}  # fmt: skip
GLIGEN_TEXT = 768  # ComfyUI goes by it: eight heads
GLIGEN = (32, 64, 64, 64, 64, 32, 32)  # widths of a UNet's attentions, from its first block to its last
SIZES = 6 * 256  # of a picture, as SDXL's network reads them
VIDEO: dict[str, Any] = {
    "extra_ff_mix_layer": True, "use_spatial_context": True, "merge_strategy": "learned_with_images",
    "merge_factor": 0.0, "video_kernel_size": [3, 1, 1], "use_temporal_resblock": True, "use_temporal_attention": True,
    "disable_temporal_crossattention": False, "in_channels": 8,
}  # fmt: skip


def seen(width: int) -> dict[str, Any]:
    return {"num_classes": "sequential", "adm_in_channels": width}


UNETS: dict[str, tuple[str, dict[str, Any]]] = {  # the class of comfy.supported_models, and what is not as in SHAPE
    "unet": ("SDXL", seen(POOLED + SIZES)),
    "unet_xl": ("SDXL", seen(POOLED_XL + SIZES)),
    "unet_refiner": ("SDXLRefiner", seen(TEXT + SIZES - 256)),
    "unet_inpaint": ("SD15", {"in_channels": 9}),
    "unet_pix2pix": ("SD15_instructpix2pix", {"in_channels": 8}),
    "unet_4x": ("SD_X4Upscaler", {"in_channels": 7, "num_classes": 1000}),
    "unet_unclip": ("SD21UnclipL", seen(2 * 768)),
    "unet_svd": ("SVD_img2vid", VIDEO | seen(3 * 256)),
    "unet_sv3d": ("SV3D_p", VIDEO | seen(5 * 256)),
    "unet_gligen": ("SD15", {"context_dim": GLIGEN_TEXT}),
    "unet_lotus": ("LotusD", {"context_dim": 1024} | seen(4)),
    "unet_zero123": ("Stable_Zero123", {"in_channels": 8, "context_dim": 768}),
}

POOLED_OF = {"unet_xl": POOLED_XL, "unet_refiner": TEXT}  # POOLED of the others


def main(directory: str) -> None:
    start_comfyui()
    import comfy.ops
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    models = Path(directory)
    unets, hypernetworks = models / "diffusion_models" / "unets", models / "hypernetworks"
    for folder in unets, hypernetworks:
        folder.mkdir(exist_ok=True)
    for name, (kind, changes) in UNETS.items():
        config = SHAPE | changes
        network = filled(UNetModel(**config, dtype=torch.float32, operations=comfy.ops.disable_weight_init))
        weights = {key: value.contiguous() for key, value in network.state_dict().items()}
        metadata = {"cp_tiny": json.dumps({"model": kind, "final": config})}
        if name == "unet_zero123":  # its file has what projects the picture, too
            dice = torch.Generator().manual_seed(4)
            weights |= {"cc_projection.weight": torch.randn(768, 772, generator=dice) * 0.1,
                        "cc_projection.bias": torch.zeros(768)}  # fmt: skip
        save_file(weights, unets / f"{name}.safetensors", metadata=metadata)
        if name == "unet":
            full = {f"model.diffusion_model.{key}": value for key, value in weights.items()}
            save_file(full, models / "checkpoints" / "unet.safetensors", metadata=metadata)
    _write_tiny_vaes(models / "vae_approx")
    save_file(_lora("middle_block.1.transformer_blocks.0.attn1.to_q"), models / "loras" / "unet.safetensors")
    torch.save(_hypernetwork(), hypernetworks / "unet.pt")
    (models / "gligen").mkdir(exist_ok=True)
    save_file(_gligen(), models / "gligen" / "unet.safetensors")


def _write_tiny_vaes(folder: Path) -> None:
    from comfy.taesd.taesd import TAESD

    folder.mkdir(exist_ok=True)
    for name, channels in ("taesd", 4), ("taef2", 128):
        weights = filled(TAESD(latent_channels=channels)).state_dict()
        for part in ("encoder", "decoder"):
            prefix = f"taesd_{part}."
            kept = {key.removeprefix(prefix): value for key, value in weights.items() if key.startswith(prefix)}
            save_file(kept, folder / f"{name}_{part}.safetensors")


def _gligen() -> dict[str, torch.Tensor]:
    from comfy.gligen import GatedSelfAttentionDense, PositionNet

    made = {"position_net": PositionNet(GLIGEN_TEXT, GLIGEN_TEXT)}
    for number, width in enumerate(GLIGEN):
        made[f"input_blocks.{number}.fuser"] = GatedSelfAttentionDense(width, GLIGEN_TEXT, 8, width // 8)
    weights = {
        f"{name}.{key}": value for name, module in made.items() for key, value in filled(module).state_dict().items()
    }
    return {
        key: torch.full_like(value, 0.8) if "alpha" in key else value.contiguous() for key, value in weights.items()
    }


def _lora(key: str) -> dict[str, torch.Tensor]:
    dice = torch.Generator().manual_seed(5)
    name, width = f"diffusion_model.{key}", 2 * WIDTH
    down, up = torch.randn(4, width, generator=dice) * 0.1, torch.randn(width, 4, generator=dice) * 0.1
    return {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}


def _hypernetwork() -> dict[Any, Any]:
    dice = torch.Generator().manual_seed(6)

    def linear(into: int, out: int, name: str) -> dict[str, torch.Tensor]:
        weight = torch.randn(out, into, generator=dice) * 0.1
        return {f"{name}.weight": weight, f"{name}.bias": torch.zeros(out)}

    def pair(width: int) -> list[dict[str, torch.Tensor]]:
        layers = linear(width, 2 * width, "linear.0"), linear(2 * width, width, "linear.1")
        return [layers[0] | layers[1] for _ in range(2)]

    return {width: pair(width) for width in (WIDTH, TEXT)} | {"activation_func": "relu"}


if __name__ == "__main__":
    main(sys.argv[1])
