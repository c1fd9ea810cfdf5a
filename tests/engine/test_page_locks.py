"""Weights in main memory whose pages cannot be locked: a run is slower, and nothing else, though the CUDA runtime keeps
the error of each failed call for the next launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from parallel_runtime.engine import weight_sources
from parallel_runtime.engine.weight_sources import FlatBlock

PEERS = 3  # processes of a machine: each has written a file of its own, and maps all


class Runtime(TorchFunctionMode):
    """A CUDA runtime that is not there. It registers memory, but for the call `failing`; its tensors are the CPU's; and
    a launch raises the error of the last call that failed, once."""

    def __init__(self, failing: int) -> None:
        super().__init__()
        self.calls = 0
        self.failing = failing
        self.registered: set[int] = set()
        self.error = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.calls += 1
        return self._did(self.calls != self.failing and size > 0, self.registered.add, address)

    def cudaHostUnregister(self, address: int) -> int:
        return self._did(address in self.registered, self.registered.discard, address)

    def _did(self, possible: bool, act: Any, address: int) -> int:
        if possible:
            act(address)
            return 0
        self.error = 1
        return self.error

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = "cpu"
            if self.error:
                self.error = 0
                raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS")
        return function(*args, **kwargs)


class Stream:
    def __init__(self, device: torch.device) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process, with the file that it has written in the place of its peers', too."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(weight_sources, "all_gather_int", lambda number, _: [number] * PEERS)


def sealed(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> tuple[weight_sources.HostWeights, nn.Linear, list[Tensor]]:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    block = nn.Linear(8, 8)
    copy = weight_sources.HostWeights(torch.device("cuda", 0), range(PEERS), 0, staged=True)
    copy._file_bytes = [0, FlatBlock(block).padded_bytes, FlatBlock(block).padded_bytes]  # what the peers have written
    copy.store(FlatBlock(block), block.weight)
    return copy, block, copy.seal()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("failing", [1, 2, 3])
def test_memory_that_cannot_be_locked_is_said_and_harms_no_launch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: int
) -> None:
    with Runtime(failing) as runtime:
        copy, block, (kept,) = sealed(runtime, monkeypatch)
        assert torch.ones(2, device="cuda").sum() == 2, "the next launch"
        assert len(runtime.registered) == PEERS - 1, "what can be locked is"
        assert "could not be page-locked: copying them will take longer" in caplog.text
        assert torch.equal(kept[: block.weight.nbytes].view(torch.float32).view(8, 8), block.weight)
        copy.close()
        assert runtime.registered == set()
        assert torch.ones(2, device="cuda").sum() == 2, "the next launch after its end"


@pytest.mark.usefixtures("alone")
def test_what_was_locked_is_unlocked_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with Runtime(failing=0) as runtime:
        copy, *_ = sealed(runtime, monkeypatch)
        assert len(runtime.registered) == PEERS
        copy.close()
        copy.close()
        assert (runtime.registered, runtime.error, caplog.text) == (set(), 0, "")
