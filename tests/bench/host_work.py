"""What the host does for a forward of attentions, counted: what it launches, and its calls of Python functions.

Eager, and replayed by the product's own recording. A CPU has no graphs, so a graph's launch is stood in for by nothing
that counts as one: the counts are those of a GPU's host, whatever the graph holds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_runtime.engine import graph_runner

LAYERS = 57  # as FLUX has
VIEWS = ("view", "transpose", "narrow", "split", "slice", "permute", "select", "unsqueeze", "squeeze", "expand",
         "unbind", "as_strided", "alias", "detach", "empty", "_unsafe_view", "reshape", "_reshape_alias")  # fmt: skip
Launched = Callable[[], Any]


class Attentions(nn.Module):
    """One after another."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        for _ in range(LAYERS):
            query = self.attend(query, key, value)
        return query


class Launches(TorchDispatchMode):
    """Views launch nothing."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.__name__.startswith(VIEWS):
            Launches.count += 1
        return function(*args, **(kwargs or {}))


class OneLaunch:
    """In place of a CUDA graph and of what records it."""

    nbytes = 0
    out: Any = None

    def warm_up(self, run: Launched) -> Any:
        return run()

    def record(self, run: Launched) -> OneLaunch:
        graph = OneLaunch()
        graph.out = run()
        return graph

    def replay(self) -> None:
        Launches.count += 1


def counted(attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: tuple[Tensor, ...]) -> dict[str, list[int]]:
    """[launches, calls of Python functions] of LAYERS attentions: eager, and replayed."""
    network = Attentions(attend)
    eager = _count(lambda: network(*inputs))
    with _of_one_launch():
        recorded = graph_runner.GraphRunner(network, torch.device("cpu"), choice="on")
        while not recorded.stats.keys and len(recorded.stats.eager) == 0:
            network(*inputs)
    assert recorded.stats.keys == 1, recorded.stats.eager
    return {"eager": eager, "recorded": _count(lambda: network(*inputs))}


def _count(run: Launched) -> list[int]:
    run()
    Launches.count = calls = 0

    def called(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call"

    with Launches():
        run()
    sys.setprofile(called)
    try:
        run()
    finally:
        sys.setprofile(None)
    return [Launches.count, calls]


@contextmanager
def _of_one_launch() -> Iterator[None]:
    """Memory that nobody delivered to holds the same each time: else no replay would be believed."""
    usual = graph_runner.cuda_graphs.recorder_for
    graph_runner.cuda_graphs.recorder_for = lambda device: OneLaunch()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        graph_runner.cuda_graphs.recorder_for = usual
        torch.use_deterministic_algorithms(False)
