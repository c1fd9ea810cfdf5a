"""One rank does something bad at a chosen moment: see sitecustomize.py.

CP_TEST_FAULT is `rank place deed`, such as `1 gather abort`, or `tape` (see tape.py), or several with `;` between them.
The file CP_TEST_AGAIN, where there is one, has calls counted from 0 again, and the deed done again, when it is touched.
The workers' own code knows nothing of it: a function of theirs is replaced when its module is imported.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

PLACES = {  # module, function, which call of it
    "join": ("parallel_runtime.engine.comm.ranks", "join", 1),
    "received": ("parallel_runtime.engine.comm.collectives", "Pending.wait", 1),
    "connect": ("parallel_runtime.wire.channel", "Channel.connect", 1),
    "start": ("parallel_runtime.worker.serve", "measured_speeds", 1),
    "load": ("parallel_runtime.worker.models", "check_files", 1),
    "loaded": ("parallel_runtime.worker.comfy_loop.comfy_model", "load", 1),
    "evaluation": ("parallel_runtime.worker.models", "Model.data_parallel", 3),
    "gather": ("parallel_runtime.engine.comm.collectives", "all_gather_v", 3),
    "step": ("parallel_runtime.worker.progress", "Progress.step", 3),
    "main_memory": ("parallel_runtime.engine.comm.ranks", "host_free_bytes", 1),
    "memory": ("parallel_runtime.worker.serve", "readings", 1),
    "reply": ("parallel_runtime.wire.channel", "Channel.send", 4),  # after Ready, Connected and Joined
    "attention": ("parallel_runtime.engine.attention.attention_override", "AttentionOverride._attend_split", 10),
    "convert": ("parallel_runtime.engine.rows.conversion", "Conversion.run", 1),
    "record": ("parallel_runtime.engine.graph_runner", "GraphRunner._try_record", 1),
    "report": ("tests.bench.report.attention_cases", "mean_error", 3),
    "attend": ("parallel_runtime.engine.attention.dispatch", "attend", 10),
    "kind": ("parallel_runtime.engine.comm.ranks", "device_kind", 1),
    "forward": ("parallel_runtime.demo.transformer", "evaluate", 2),
    "tokens": ("parallel_runtime.engine.attention.context_attention", "ContextAttention._run", 1),
    "group_norm": ("parallel_runtime.engine.rows.functions", "group_norm", 1),
}
AGAIN = "CP_TEST_AGAIN"
LARGEST = 16 * 32 * 32  # elements; what is larger is out of memory
PACE = {"pace": 8e-3, "slow": 16e-3}  # seconds that a block takes for each token of a rank, so that all else is little


def do(deed: str) -> None:
    if deed == "raise":
        raise RuntimeError("sabotage")
    if deed == "refuse":
        from parallel_runtime.errors import Refused

        raise Refused("sabotage cannot be honoured; leave it")
    if deed == "exhaust":
        import torch

        raise torch.OutOfMemoryError("sabotage")
    if deed == "abort":
        os.abort()
    if deed == "exit":
        os._exit(3)
    os.kill(os.getpid(), signal.Signals[deed])


def refuse_large(tensors: Sequence[Any]) -> None:
    if any(tensor.numel() > LARGEST for tensor in tensors if hasattr(tensor, "numel")):
        import torch

        raise torch.OutOfMemoryError("sabotage")


def with_another_model(readings: Any) -> Any:
    """This rank says that it holds a model that nobody can take from it."""
    from parallel_runtime.wire.messages import ModelMemory

    return dataclasses.replace(readings, weights=(*readings.weights, ModelMemory("somebody else's", 1 << 40)))


def in_half(model: Any) -> Any:
    """ComfyUI has this rank compute in another type than the others, as on an older card."""
    import torch

    model.patcher.model.manual_cast_dtype = torch.bfloat16
    return model


def last_touched() -> int:
    return os.stat(os.environ[AGAIN]).st_mtime_ns if AGAIN in os.environ else 0


def over_nccl(deed: str, variable: str, by_gloo: bool) -> None:
    """Joining hangs or fails until this variable of NCCL's is set, or gloo is used."""
    if variable in os.environ or by_gloo:
        return
    if deed == "hang":
        time.sleep(1000)
    raise RuntimeError("NCCL error: Error while creating shared memory segment")


def changed(transfer: Any) -> Any:
    """Of many numbers that arrive over P2P one is not what was sent."""
    if transfer[0].numel() > 1000:
        transfer[0].view(-1)[7] += "NCCL_P2P_DISABLE" not in os.environ
    return transfer


ALWAYS: dict[str, Callable[[Any], Any]] = {
    "out_of_memory": lambda made: made,
    "shift": lambda made: made + 0.5,
    "changed": changed,
    "crawl": lambda made: time.sleep(0.6) or made,
    "full": with_another_model,
    "in_half": in_half,
    "unlike": lambda made: f"{made} of another kind",
}


class Saboteur:
    """A finder of modules that replaces one function of one module."""

    def __init__(self, place: str, deed: str) -> None:
        self.module, self.function, self.call = PLACES[place]
        self.deed = deed

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.module:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            *owners, last = self.function.split(".")
            owner = functools.reduce(getattr, owners, module)
            setattr(owner, last, self.spoiled(getattr(owner, last)))

        loader.exec_module = exec_module
        return spec

    def spoiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        calls = touched = 0

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls, touched
            if touched != (now := last_touched()):
                calls, touched = 0, now
            calls += 1
            if self.deed == "out_of_memory":
                refuse_large(args)
            if "=" in self.deed:
                over_nccl(*self.deed.split("="), kwargs["through_main_memory"])
                return function(*args, **kwargs)
            if self.deed in PACE:
                time.sleep(PACE[self.deed] * args[1].shape[1])
                return function(*args, **kwargs)
            if self.deed == "dwindle":
                return function(*args, **kwargs) // calls
            if self.deed in ALWAYS:
                return ALWAYS[self.deed](function(*args, **kwargs))
            if calls == self.call and self.deed != "deviate":
                do(self.deed)
            result = function(*args, **kwargs)
            return result + 1e-6 if calls == self.call and self.deed == "deviate" else result

        return call


def install(fault: str) -> None:
    rank, place, deed = fault.split()
    if os.environ.get("RANK") == rank:  # torchrun's agent has none
        sys.meta_path.insert(0, Saboteur(place, deed))  # type: ignore[arg-type]
