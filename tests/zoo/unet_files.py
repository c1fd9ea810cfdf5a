"""Files of shallow UNets, and of what is made for them: a LoRA, a hypernetwork, GLIGEN, and tiny VAEs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .files import Weights, low_rank, save_network, save_tiny_vae, save_weights
from .tiny import filled, make
from .unets import GLIGEN_TEXT, SHALLOW, TEXT, UNET_FILES

WIDTH = SHALLOW["model_channels"]
GLIGEN = (32, 64, 64, 64, 64, 32, 32)  # widths of a UNet's attentions, from its first block to its last


def write(models: Path) -> None:
    from comfy.taesd.taesd import TAESD

    for name in UNET_FILES:
        more = _projection() if name == "unet_zero123" else None
        save_network(name, models / "diffusion_models" / "unets" / f"{name}.safetensors", more)
    save_weights("sd15_calm", models / "diffusion_models" / "unets" / "sd15_calm.safetensors", _calm())
    save_network("unet", models / "checkpoints" / "unet.safetensors", prefix="model.diffusion_model.")
    for name, channels in ("taesd", 4), ("taef2", 128):
        save_tiny_vae(filled(TAESD(latent_channels=channels)), models / "vae_approx", name)
    for folder in "hypernetworks", "gligen":
        (models / folder).mkdir(exist_ok=True)
    key = "diffusion_model.middle_block.1.transformer_blocks.0.attn1.to_q"
    save_file(low_rank(key, 2 * WIDTH, 2 * WIDTH, seed=5), models / "loras" / "unet.safetensors")
    torch.save(_hypernetwork(), models / "hypernetworks" / "unet.pt")
    save_file(_gligen(), models / "gligen" / "unet.safetensors")


def _calm() -> Weights:
    """Small weights, with which a run at full guidance amplifies no rounding."""
    dice = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(value.shape, generator=dice) * (0.05 if value.ndim > 1 else 0.2)
        + (1.0 if value.ndim == 1 and "norm" in name else 0.0)
        for name, value in make("sd15_calm").state_dict().items()
    }


def _projection() -> Weights:
    """What projects the picture, which is in Zero123's file, too."""
    dice = torch.Generator().manual_seed(4)
    weight = torch.randn(768, 772, generator=dice) * 0.1
    return {"cc_projection.weight": weight, "cc_projection.bias": torch.zeros(768)}


def _gligen() -> Weights:
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


def _hypernetwork() -> dict[Any, Any]:
    dice = torch.Generator().manual_seed(6)

    def linear(into: int, out: int, name: str) -> Weights:
        weight = torch.randn(out, into, generator=dice) * 0.1
        return {f"{name}.weight": weight, f"{name}.bias": torch.zeros(out)}

    def pair(width: int) -> list[Weights]:
        layers = linear(width, 2 * width, "linear.0"), linear(2 * width, width, "linear.1")
        return [layers[0] | layers[1] for _ in range(2)]

    return {width: pair(width) for width in (WIDTH, TEXT)} | {"activation_func": "relu"}
