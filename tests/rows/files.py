"""VAE files with random weights that ComfyUI's loaders know: `python -m tests.rows.files COMFYUI MODELS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def write(models: Path) -> None:

    from . import zoo

    vae, approximate = models / "vae", models / "vae_approx"
    vae.mkdir(exist_ok=True)
    approximate.mkdir(exist_ok=True)
    for seed, name in enumerate(("wan", "other_wan")):
        save_file(
            _weights(zoo.random_weights(zoo.CASES["Wan 2.1, Qwen-Image"].make(), seed)), vae / f"{name}.safetensors"
        )
    save_file(_weights(zoo.random_weights(_flux(zoo))), vae / "flux.safetensors")
    for version in (0, 1):
        ltx = zoo.random_weights(zoo.ltx(version))
        metadata = {"config": json.dumps({"vae": ltx.config})}
        save_file(_weights(ltx), vae / f"ltx{version}.safetensors", metadata=metadata)
    tiny = _weights(zoo.random_weights(zoo.CASES["TAESD"].make()))
    for part in ("encoder", "decoder"):
        prefix = f"taesd_{part}."
        weights = {name.removeprefix(prefix): value for name, value in tiny.items() if name.startswith(prefix)}
        save_file(weights, approximate / f"taef1_{part}.safetensors")


def _flux(zoo: Any) -> torch.nn.Module:
    """ComfyUI fixes the encoder's width, and goes by the file for the decoder's."""
    from comfy.ldm.models.autoencoder import AutoencodingEngine

    narrow = {**zoo.KL, "z_channels": 16, "num_res_blocks": 2, "ch_mult": [1, 2, 4, 4]}
    return AutoencodingEngine(
        regularizer_config={"target": zoo.GAUSSIAN},
        encoder_config={"target": "comfy.ldm.modules.diffusionmodules.model.Encoder", "params": {**narrow, "ch": 128}},
        decoder_config={"target": "comfy.ldm.modules.diffusionmodules.model.Decoder", "params": narrow},
    )


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.contiguous().clone() for name, value in model.state_dict().items()}


if __name__ == "__main__":
    sys.path.append(sys.argv[1])
    models = Path(sys.argv[2])
    sys.argv[1:] = ["--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    write(models)
