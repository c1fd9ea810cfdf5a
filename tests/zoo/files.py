"""Writes tiny files into a folder of models, in ComfyUI's python: `python -m tests.zoo.files MODELS WHAT ...`.

What: a module here that has a function `write`, or a network of the table by its name. With tests/site on PYTHONPATH
ComfyUI's classes of model patches are as small as their files.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from .tiny import ROWS, make, normal, seed, start_comfyui

Weights = dict[str, Tensor]


def weights_of(network: nn.Module, prefix: str = "") -> Weights:
    return {prefix + name: value.contiguous().clone() for name, value in network.state_dict().items()}


def save_network(name: str, path: Path, more: Weights | None = None, prefix: str = "") -> Weights:
    """A row of the table in a file that tells the tests' ComfyUI how small it is, with `more` weights."""
    network = make(name)
    weights = weights_of(network)
    weights |= {key: normal(*shape) * 0.1 for key, shape in ROWS[name].beside.items()} | (more or {})
    save_weights(name, path, {prefix + key: value for key, value in weights.items()})
    return weights


def save_weights(name: str, path: Path, weights: Weights) -> None:
    row = ROWS[name]
    path.parent.mkdir(exist_ok=True, parents=True)
    save_file(weights, path, metadata={"cp_tiny": json.dumps({"model": row.model, "final": row.config})})


def save_tiny_vae(autoencoder: nn.Module, folder: Path, name: str) -> None:
    """One of the TAESD class, whose halves are files."""
    folder.mkdir(exist_ok=True)
    for part in ("encoder", "decoder"):
        prefix = f"taesd_{part}."
        half = {key.removeprefix(prefix): value for key, value in weights_of(autoencoder).items() if prefix in key}
        save_file(half, folder / f"{name}_{part}.safetensors")


def low_rank(key: str, out: int, into: int, seed: int) -> Weights:
    """A LoRA of rank 4 for one matrix."""
    dice = torch.Generator().manual_seed(seed)
    down, up = torch.randn(4, into, generator=dice) * 0.1, torch.randn(out, 4, generator=dice) * 0.1
    return {f"{key}.lora_down.weight": down, f"{key}.lora_up.weight": up}


def main(models: str, *names: str) -> None:
    start_comfyui()
    for name in names:
        seed(torch.Generator().initial_seed())  # whatever was written before
        if name in ROWS:
            save_network(name, Path(models) / "diffusion_models" / "networks" / f"{name}.safetensors")
        else:
            importlib.import_module(f".{name}", __package__).write(Path(models))


if __name__ == "__main__":
    main(*sys.argv[1:])
