"""Writes a tiny network of convolutions that ComfyUI takes for SD1.5's: `python write_unet.py COMFYUI FILE`.

Runs in ComfyUI's Python: the network is its own.
"""

from __future__ import annotations

import json
import sys

import torch
from safetensors.torch import save_file

TINY = {"model_channels": 32, "context_dim": 32}
PUBLISHED = {"model_channels": 320, "context_dim": 768}  # what ComfyUI knows SD1.5 by
SHAPE = {
    "image_size": 32, "in_channels": 4, "out_channels": 4, "num_res_blocks": [1, 1], "channel_mult": (1, 2),
    "transformer_depth": [1, 1], "transformer_depth_output": [1, 1, 1, 1], "transformer_depth_middle": 1,
    "num_heads": 8, "use_spatial_transformer": True, "use_linear_in_transformer": False, "legacy": False,
}  # fmt: skip


def main(comfyui: str, path: str) -> None:
    sys.path[0] = comfyui  # not this folder, which has a module comfy
    sys.argv = ["main.py", "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.ops
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    dice = torch.Generator().manual_seed(3)
    network = UNetModel(**SHAPE, **TINY, dtype=torch.float32, operations=comfy.ops.disable_weight_init)
    weights = {
        name: torch.randn(tensor.shape, generator=dice) * (0.05 if tensor.ndim > 1 else 0.2)
        + (1.0 if tensor.ndim == 1 and "norm" in name else 0.0)
        for name, tensor in network.state_dict().items()
    }
    save_file(weights, path, metadata={"cp_tiny": json.dumps({"match": PUBLISHED, "final": TINY})})


if __name__ == "__main__":
    main(*sys.argv[1:3])
