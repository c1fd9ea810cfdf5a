"""A CUDA graph's semantics on the CPU: operators are recorded with their tensors, and replayed without any Python.

What a graph would get wrong a tape gets wrong too: an input that was not copied in, a branch taken by value, a number
read on the host, memory that somebody reuses. With CP_TEST_FAULT=tape workers record with it all that "auto" may.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

RECORDING = "parallel_runtime.engine.graph_runner"
READ_ON_THE_HOST = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
OF_SUCH = ("is_nonzero", "item", "equal", "allclose")  # made of operators that do


def tensors_in(*values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class Tape(TorchDispatchMode):
    """`Tape(run)`; change the inputs in place, `replay()`: `out` holds what run() would give now."""

    def __init__(self, run: Callable[[], Any]) -> None:
        super().__init__()
        self.nbytes = 0
        self._steps: list[tuple[str, Any, Any, Any, Any]] = []
        self._reads: list[str] = []
        with self:
            self.out = run()
        if self._reads:  # not in the middle: other ranks would wait in an exchange
            raise RuntimeError(f"operation not permitted when stream is capturing: {self._reads[0]} reads on the host")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._reads_numbers(function, args, kwargs):
            self._reads.append(str(function))
        out = function(*args, **kwargs)
        made, given = tensors_in(out), {t.untyped_storage().data_ptr() for t in tensors_in(args, kwargs)}
        if function.namespace == "c10d":
            self._steps.append(("wire", function, args, kwargs, out))
        elif function._schema.is_mutable:
            self._steps.append(("write", function, args, kwargs, out))
        elif made and not all(t.untyped_storage().data_ptr() in given for t in made):  # else views
            self._steps.append(("make", function, args, kwargs, out))
            self.nbytes += sum(t.nbytes for t in made)
        return out

    @staticmethod
    def _reads_numbers(function: Any, args: Any, kwargs: Any) -> bool:
        if "index" in function.__name__:  # only a mask's shape depends on values
            return any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1:], kwargs)[:1])
        made_of_such = function.__name__.partition(".")[0] in OF_SUCH
        return made_of_such or any(tag in function.tags for tag in READ_ON_THE_HOST)

    def replay(self) -> None:
        pending: list[Any] = []
        for kind, function, args, kwargs, out in self._steps:
            if kind != "wire":
                _settle(pending)
            got = function(*args, **kwargs)
            if kind == "wire":
                pending += [
                    work for work in pytree.tree_leaves(got) if hasattr(work, "wait") and not torch.is_tensor(work)
                ]
            elif kind == "make":
                for recorded, new in zip(tensors_in(out), tensors_in(got), strict=True):
                    if recorded.data_ptr() != new.data_ptr():
                        recorded.copy_(new)
        _settle(pending)


def _settle(pending: list[Any]) -> None:
    for work in pending:
        work.wait()
    pending.clear()


class TapeRecorder:
    """In place of CudaRecorder."""

    @staticmethod
    def warm_up(run: Callable[[], Any]) -> Any:
        return run()

    @staticmethod
    def record(run: Callable[[], Any]) -> Tape:
        return Tape(run)


def record_with_tapes(recording: Any) -> None:
    """From now on this module records every call at its second evaluation, as if every launch were slow, and keeps it
    however slow a tape is."""
    recording.cuda_graphs.recorder_for = lambda device: TapeRecorder()
    recording.WARMUP_EVALUATIONS, recording.MIN_LAUNCH_FRACTION, recording.MAX_REPLAY_RATIO = 1, 0.0, float("inf")
