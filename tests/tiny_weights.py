"""A seeded state dict under construction."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Overrides = dict[str, Any] | None  # what ComfyUI's detection must be told of a width that it hard-codes


class Weights:
    """Parameters are drawn in the order in which they are named."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, Tensor] = {}

    def normal(self, name: str, *shape: int, std: float = 1.0, mean: float = 0.0) -> None:
        assert name not in self.tensors, name
        self.tensors[name] = torch.randn(*shape, generator=self.generator) * std + mean

    def linear(self, name: str, out: int, inner: int, bias: bool = True, gain: float = 1.0) -> None:
        self.normal(f"{name}.weight", out, inner, std=gain / math.sqrt(inner))
        if bias:
            self.normal(f"{name}.bias", out, std=0.05)

    def conv(self, name: str, out: int, inner: int, *kernel: int) -> None:
        self.normal(f"{name}.weight", out, inner, *kernel, std=1 / math.sqrt(inner * math.prod(kernel)))
        self.normal(f"{name}.bias", out, std=0.05)

    def rms(self, name: str, dim: int) -> None:
        self.normal(name, dim, std=0.1, mean=1.0)

    def layer_norm(self, name: str, dim: int) -> None:
        self.rms(f"{name}.weight", dim)
        self.normal(f"{name}.bias", dim, std=0.05)
