"""Writes every network of networks.py: `python -m tests.comfyui.write_networks FOLDER`, in ComfyUI's python; names
behind the folder: those alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from safetensors.torch import save_file

from ..architectures.tiny import normal, start_comfyui


def main(folder: str, *names: str) -> None:
    start_comfyui()
    from .networks import NETWORKS, WITHOUT_PLAN

    for name, network in (NETWORKS | WITHOUT_PLAN).items():
        if name not in (names or NETWORKS):
            continue
        built = network.build()
        tiny = {"model": network.model, "final": built.unet_config}
        weights = {key: tensor.contiguous() for key, tensor in built.state_dict().items()}
        weights |= {key: normal(*shape) * 0.1 for key, shape in network.more_weights.items()}
        save_file(weights, Path(folder) / f"{name}.safetensors", metadata={"cp_tiny": json.dumps(tiny)})


if __name__ == "__main__":
    main(*sys.argv[1:])
