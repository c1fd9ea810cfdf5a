"""Makes the networks of the table in networks.py, in ComfyUI's python, after `start_comfyui`."""

from __future__ import annotations

import importlib
import math
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

from .networks import NETWORKS
from .unets import UNETS

_LEARNT = ("pos_embed", "inv_freq", "beta")  # buffers that come with the weights
_GENERATOR = torch.Generator()
_COMPUTED_IN = [torch.float32]
ROWS = NETWORKS | UNETS


def start_comfyui() -> None:
    """Make `comfy` importable, in float32 on the CPU."""
    sys.path.append(os.environ["COMFYUI_PATH"])
    arguments, sys.argv = sys.argv, ["main.py", "--cpu", "--force-fp32", "--use-pytorch-cross-attention"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.cli_args  # reads them

    sys.argv = arguments


def seed(number: int) -> None:
    _GENERATOR.manual_seed(number)


def computed_in(dtype: torch.dtype) -> None:
    """What networks that are built from now on are told to compute in; some keep weights in float32 all the same."""
    _COMPUTED_IN[:] = [dtype]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_GENERATOR)


def uniform(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=_GENERATOR)


def kind_of(path: str) -> Any:
    """The class "module:name" below comfy."""
    module, name = path.split(":")
    return getattr(importlib.import_module(f"comfy.{module}"), name)


def settings(device: str = "cpu") -> dict[str, Any]:
    """What ComfyUI's classes are told beside their config."""
    import comfy.ops

    return {"dtype": _COMPUTED_IN[0], "device": device, "operations": comfy.ops.disable_weight_init}


def make(name: str, **changes: Any) -> nn.Module:
    """The network of this name in the table, with `changes` to its config."""
    row = ROWS[name]
    network = build(row.kind, **row.config | changes)
    for weight, factor in row.scaled.items():
        network.get_parameter(weight).mul_(factor)
    return network


def build(path: str, **config: Any) -> nn.Module:
    """A network of class `path`, "module:name" below comfy."""
    network: nn.Module = kind_of(path)(**config, **settings()).eval()
    network.unet_config = config  # type: ignore[assignment]  # what a file of it says of itself
    return filled(network)


def filled(network: nn.Module) -> nn.Module:
    """Random weights in it."""
    seed(7)
    buffers = [(name, buffer) for name, buffer in network.named_buffers() if name.endswith(_LEARNT)]
    for name, tensor in [*network.named_parameters(), *buffers]:
        if tensor.ndim >= 2:
            value = normal(*tensor.shape) / math.sqrt(tensor[0].numel())
        else:
            value = normal(*tensor.shape) * 0.1 + (1 if name.endswith(("weight", "scale")) else 0)
        tensor.data = value.to(tensor.dtype)
    return network.requires_grad_(False)
