"""Checks the memory that recordings share on a GPU: a graph outlives another model's, and all memory is given back,
also after a failed capture. No CPU can show this: cuBLAS's workspaces and PyTorch's pools are the GPU's own.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallel_runtime.engine import cuda_graphs

from ..bench.report.measuring import GIB, NO_GRAPHS, Case, Measurement, Setting

REPLAYS = 100
WIDTH, INSIDE = 64, 16384  # sums so long are split, and their parts added up in cuBLAS's workspace
PIECE = 2 << 20  # bytes
SMALL = 8 << 20  # bytes: less than any pool has, more than PyTorch keeps for a few tensors
FILLED = 0xFF  # in each byte: not a number in any type


def cases(setting: Setting, device: torch.device) -> Iterator[Case]:
    if device.type != "cuda":
        yield Case({"what": "graphs and their pools"}, lambda: {"note": NO_GRAPHS})
        return
    yield Case({"what": "replays after another model's graphs are gone"}, partial(_outliving, device))
    for what, fail in FAILURES.items():
        yield Case({"what": f"a capture that fails: {what}"}, partial(_failing, fail, device))


def _outliving(device: torch.device) -> Measurement:
    """Measures the largest difference of a network's replays from itself while the memory that another one's graphs
    have left is filled with NaN, and checks that no replay wrote there."""
    first, second = (_Recorded(device) for _ in range(2))
    for each in (first, second):
        each.record()
    first.replay()
    expected = second.run().clone()
    before = _reserved()
    first.discard()
    freed = before - _reserved()
    filler = [torch.full((PIECE,), FILLED, dtype=torch.uint8, device=device) for _ in range(1 + 2 * freed // PIECE)]
    errors = [(second.replay().float() - expected.float()).abs().max() for _ in range(REPLAYS)]
    error = float(torch.stack(errors).max())
    written = sum(int((piece != FILLED).sum()) for piece in filler)
    assert not written, f"{written} bytes were written that belong to others"
    assert error == 0, f"a replay is {error} off"
    return {"error": error, "gib": freed / GIB, "note": f"{REPLAYS} replays; memory is what the others gave back"}


def _failing(fail: Callable[[Tensor], object], device: torch.device) -> Measurement:
    """Measures what a failed capture keeps of the device, besides a good graph and after that one is gone, and checks
    that the good one's replay and a later recording are right."""
    good = _Recorded(device)
    begun = _reserved()
    good.record()
    recorded = _reserved()
    try:
        good.record(fail)
    except RuntimeError as error:
        message, *_ = str(error).splitlines()
    else:
        raise AssertionError("it was recorded all the same")
    retained = _reserved() - recorded
    expected = good.run().clone()
    assert torch.equal(good.replay(), expected), "the earlier graph computes something else"
    good.record()
    assert torch.equal(good.replay(), expected), "a later graph computes something else"
    good.discard()
    leaked = _reserved() - begun
    assert max(retained, leaked) < SMALL, f"{retained} bytes stay after the failure, {leaked} when all graphs are gone"
    return {"gib": max(0, leaked) / GIB, "note": message}


class _Recorded:
    """A network, and the latest graph of it."""

    def __init__(self, device: torch.device) -> None:
        kind: Any = {"dtype": torch.bfloat16, "device": device}
        self._network: nn.Module = nn.Sequential(nn.Linear(WIDTH, INSIDE, **kind), nn.Linear(INSIDE, WIDTH, **kind))
        self._input = torch.randn(WIDTH, WIDTH, **kind)
        self._recorder: Any = cuda_graphs.recorder_for(device)
        self._graph: Any = None

    def run(self) -> Tensor:
        out: Tensor = self._network(self._input)
        return out

    def record(self, act: Callable[[Tensor], object] = lambda _: None) -> None:
        """Records a run that calls `act` in its middle; raises RuntimeError, and keeps the earlier graph, where that
        fails."""

        def run() -> Tensor:
            out = self.run()
            if torch.cuda.is_current_stream_capturing():
                act(out)
            return out

        self._recorder.warm_up(run)
        self._graph = self._recorder.record(run)

    def replay(self) -> Tensor:
        self._graph.replay()
        out: Tensor = self._graph.out
        return out

    def discard(self) -> None:
        """Frees the graph and its pool; the network stays."""
        self._graph = self._recorder = None


def _read(out: Tensor) -> None:
    out.sum().item()


def _run_out(out: Tensor) -> None:
    torch.empty(2 * torch.cuda.mem_get_info(out.device)[1], dtype=torch.uint8, device=out.device)


def _leave_unjoined(out: Tensor) -> None:
    """Forks a stream and never joins it, as an exception between a transfer's start and end does."""
    side = torch.cuda.Stream(out.device)
    side.wait_stream(torch.cuda.current_stream(out.device))
    with torch.cuda.stream(side):
        out.mul(2)


def _raise(_: Tensor) -> None:
    raise ValueError("in Python alone")


FAILURES: dict[str, Callable[[Tensor], object]] = {
    "a number is read on the host": _read,
    "memory runs out": _run_out,
    "another stream is not waited for": _leave_unjoined,
    "an exception of Python's": _raise,
}


def _reserved() -> int:
    """Returns the bytes that PyTorch has reserved on the device after it has freed what it can."""
    gc.collect()
    torch.cuda.synchronize()
    cuda_graphs.clear_workspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()
