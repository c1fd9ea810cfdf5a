"""Writes networks of the zoo into a folder: `python -m tests.comfyui.write_networks FOLDER [NAME ...]`, in ComfyUI's
python."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import save_file

from ..zoo.networks import NETWORKS
from ..zoo.tiny import make, normal, start_comfyui
from .conditioning import SAMPLED


def main(folder: str, *names: str) -> None:
    start_comfyui()
    for name in names or SAMPLED:
        row, built = NETWORKS[name], make(name)
        tiny = {"model": row.model, "final": built.unet_config}
        weights = {key: tensor.contiguous() for key, tensor in built.state_dict().items()}
        weights |= {key: normal(*shape) * 0.1 for key, shape in row.beside.items()}
        save_file(weights, Path(folder) / f"{name}.safetensors", metadata={"cp_tiny": json.dumps(tiny)})


if __name__ == "__main__":
    main(*sys.argv[1:])
