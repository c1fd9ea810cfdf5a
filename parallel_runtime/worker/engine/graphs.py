"""What a run launches, recorded as one launch: a CUDA graph. Knows no network, and not when recording pays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

Run = Callable[[], Any]

# All that a forward raises: one that went through a moment ago may fail in a capture by what a capture forbids.
FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


class Recorder:
    """Records for one network: its graphs share their memory, since they run one after another."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._constants = Constants()

    def rehearse(self, run: Run) -> Any:
        """Run it as it is, and note what recording it will need. What it returned."""
        self._constants = Constants()
        with self._constants:
            return run()

    def record(self, run: Run) -> Graph:
        """Collective where `run` is. Raises RuntimeError where it cannot be recorded; nothing of it ran then."""
        return Graph(run, self._pool, self._constants)


class Graph:
    """A recorded run. `out` is what the run returned: memory that each replay writes anew. `nbytes` of the device stay
    taken until the graph is gone."""

    def __init__(self, run: Run, pool: Any, constants: Constants) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._constants = constants  # what is copied in each replay stays where it is
        self.out: Any = None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before, stream = torch.cuda.memory_reserved(), torch.cuda.current_stream()
        failed: list[Exception] = []
        try:
            # Other threads, NCCL's watchdog among them, may ask the device meanwhile.
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                try:
                    with constants.again():
                        self.out = run()
                except FAILURES as error:
                    failed.append(error)  # the end of the capture would hide it behind an error of its own
        except RuntimeError as error:
            failed.append(error)
            torch.cuda.set_stream(stream)
        if failed:
            self.out = None
            raise RuntimeError(f"{type(failed[0]).__name__}: {failed[0]}") from failed[0]
        self.nbytes = max(0, torch.cuda.memory_reserved() - before)

    def replay(self) -> None:
        """The same work again, on what its inputs hold now."""
        self._graph.replay()


class Constants(TorchFunctionMode):
    """What a forward makes on the CPU and sends to the device. All that is made there follows from Python's values, so
    it is the same in every replay. A graph can copy it from memory that is locked in its place, and a capture may take
    no such memory: a rehearsal does, and the capture finds the same again.

    The second time raises RuntimeError where it differs from the first, or where they are too many to be kept.
    """

    MOST_BYTES = 64 << 20

    def __init__(self, pin: Callable[[Tensor], Tensor] = Tensor.pin_memory) -> None:
        super().__init__()
        self._pin = pin
        self._kept: list[Tensor] = []
        self._found: int | None = None  # so many, in a capture

    def again(self) -> Constants:
        """The same, for the capture."""
        if self._too_many:
            raise RuntimeError(f"its forward sends more than {self.MOST_BYTES >> 20} MiB from main memory")
        self._found = 0
        return self

    @property
    def _too_many(self) -> bool:
        return sum(kept.nbytes for kept in self._kept) > self.MOST_BYTES

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and not torch.is_tensor(args[0]) and _is_away(kwargs.get("device")):
            made = func(*args, **{**kwargs, "device": "cpu"})
            return self._kept_one(made).to(kwargs["device"], non_blocking=True)
        if func is Tensor.to and args[0].device.type == "cpu":
            words = {name: value for name, value in kwargs.items() if name != "copy"}
            device, dtype, _, layout = torch._C._nn._parse_to(*args[1:], **words)
            if _is_away(device):
                sent = self._kept_one(args[0]).to(device, non_blocking=True)
                return sent.to(dtype=dtype or sent.dtype, memory_format=layout or torch.preserve_format)
        if func is Tensor.cuda and args[0].device.type == "cpu":
            return self._kept_one(args[0]).cuda(*args[1:], **{**kwargs, "non_blocking": True})
        if func is Tensor.copy_ and args[0].device.type != "cpu" and args[1].device.type == "cpu":
            return args[0].copy_(self._kept_one(args[1]), non_blocking=True)
        return func(*args, **kwargs)

    def _kept_one(self, made: Tensor) -> Tensor:
        if self._found is None:
            if not self._too_many:
                self._kept.append(self._pin(made))
            return made
        self._found += 1
        if self._found > len(self._kept) or not torch.equal(kept := self._kept[self._found - 1], made):
            raise RuntimeError("its forward sends other numbers from main memory each time")
        return kept


@contextmanager
def unwatched() -> Iterator[None]:
    """For compiled code: it would be compiled anew for a mode that was not there before."""
    if isinstance(_get_current_function_mode(), Constants):
        with _pop_mode_temporarily():
            yield
    else:
        yield


def _is_away(device: Any) -> bool:
    return device is not None and torch.device(device).type != "cpu"


def recorder_for(device: torch.device) -> Recorder | None:
    """What records on this device; None where there is nothing of the kind."""
    return Recorder() if device.type == "cuda" else None
