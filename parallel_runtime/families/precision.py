"""Where diffusers rounds differently from ComfyUI, and how a loaded transformer is brought in line. Knows no model."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

TORCH_EPS = torch.finfo(torch.float32).eps  # what torch's RMSNorm(eps=None) adds, for bfloat16 inputs too


def set_eps(transformer: nn.Module, table: Mapping[str, float]) -> None:
    """Give the norms whose names match (shell patterns) ComfyUI's epsilon."""
    for name, module in transformer.named_modules():
        for pattern, eps in table.items():
            if fnmatchcase(name, pattern):
                module.eps = eps


def keep_timestep(transformer: nn.Module, timesteps: nn.Module, scale: float = 1.0) -> None:
    """Let the sinusoid see the timestep in float32.

    diffusers rounds it to the model's dtype on the way, which costs up to 0.28 rms in bfloat16. `timesteps` is the
    transformer's Timesteps module, `scale` what the transformer multiplies by before it.
    """
    exact: list[Tensor] = []

    def remember(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        exact[:] = [kwargs["timestep"].float() * scale]

    def restore(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (exact.pop(),) if exact else args  # the first call is the timestep, a second one the guidance

    transformer.register_forward_pre_hook(remember, with_kwargs=True)
    timesteps.register_forward_pre_hook(restore)


def compute_in_float32(module: nn.Module) -> None:
    """Let a module with float32 weights take and return any dtype."""
    forward = module.forward

    def in_float32(x: Tensor) -> Tensor:
        return forward(x.float()).to(x.dtype)

    module.forward = in_float32  # type: ignore[method-assign]


def absent_as_zero(embedder: nn.Module) -> None:
    """Let an embedding of NaN be zero: how guidance None travels, for which diffusers has no word."""

    def erase(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return torch.where(output.isnan(), 0.0, output)

    embedder.register_forward_hook(erase)
