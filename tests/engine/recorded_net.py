"""A small network whose forwards are recorded, by tape where there is no CUDA, for the tests of recordings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from parallel_runtime.engine.graph_runner import GraphRunner

CPU = torch.device("cpu")


class Net(nn.Module):
    """Counts how often its Python runs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weight = nn.Parameter(torch.randn(8, 8), requires_grad=False)
        self.runs = 0

    def forward(self, x: Tensor, t: Tensor, scale: float = 1.0, more: Any = None, **_: Any) -> Any:
        self.runs += 1
        return scale * (x @ self.weight).add_(t[:, None])


def made(net: nn.Module, **settings: Any) -> GraphRunner:
    return GraphRunner(net, CPU, **{"choice": "on", **settings})


def inputs(seed: int = 0, rows: int = 2) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=dice), torch.rand(rows, generator=dice)


def eagerly(net: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return net._call_impl(*args, **kwargs)
