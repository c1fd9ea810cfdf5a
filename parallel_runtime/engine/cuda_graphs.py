"""Records the launches of a run as one CUDA graph, and compiles blocks one by one; the hooks that split their tensors
stay outside of compiled graphs. Knows no network, and not when recording pays."""

from __future__ import annotations

import functools
import gc
import importlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch._inductor
from torch import Tensor, nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import BackendCompilerFailed
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from ..errors import Refused
from ..specs import Compilation

Forward = Callable[[], Any]
LRU_CACHE = type(functools.lru_cache(int))

# All that a forward raises: one that succeeded a moment ago may fail in a capture by what a capture forbids.
FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)


class Recorder:
    """Records the runs of one network, whose graphs share memory, since they run one after another."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._constants = Constants()

    def warm_up(self, run: Forward) -> Any:
        """Calls `run` eagerly, and notes the constants that its recording needs. Returns what `run` returned."""
        self._constants = Constants()
        with self._constants:
            return run()

    def record(self, run: Forward) -> Graph:
        """Records `run`. Raises RuntimeError where it cannot be, and nothing ran. Collective where `run` is."""
        try:
            return Graph(run, self._pool, self._constants)
        except RuntimeError:
            self._pool = torch.cuda.graph_pool_handle()  # no later graph shares one in which a capture has failed
            raise


class Graph:
    """A recorded run. `out` is what it returned, which each replay overwrites; it takes `nbytes` of the device."""

    def __init__(self, run: Forward, pool: Any, constants: Constants) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._constants = constants  # each replay copies from them
        self.out: Any = None
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before, stream = torch.cuda.memory_reserved(), torch.cuda.current_stream()
        free, _ = torch.cuda.mem_get_info()
        begun, failed = False, ""  # as text: an exception would keep all tensors of its frames
        try:
            # Other threads, NCCL's watchdog among them, may ask the device meanwhile.
            with _isolated_capture(), torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                begun = True
                try:
                    with constants.for_capture():
                        self.out = run()
                except FAILURES as error:  # the end of the capture would raise another error instead
                    failed = f"{type(error).__name__}: {error}"
        except RuntimeError as error:
            failed = failed or f"{type(error).__name__}: {error}"
            torch.cuda.set_stream(stream)
            if begun:
                _leave_pool(self._graph, pool)
        if failed:
            self.out = None
            raise RuntimeError(failed)
        # The driver allocates the graph itself: PyTorch counts its tensors alone.
        self.nbytes = max(0, torch.cuda.memory_reserved() - before, free - torch.cuda.mem_get_info()[0])

    def replay(self) -> None:
        """Runs the recorded work again, on the current contents of its inputs."""
        self._graph.replay()


@contextmanager
def _isolated_capture() -> Iterator[None]:
    """Isolates a capture: it uses no cuBLAS workspace of another pool, and leaves none of its own to others."""
    collecting = gc.isenabled()
    gc.disable()  # deleting a graph or an event would end the capture
    try:
        # PyTorch keeps cuBLAS's workspaces by stream, and all captures run on one: else the graphs of one model would
        # use a workspace in the pool of another, which is freed with that model.
        clear_workspaces()
        yield
    finally:
        clear_workspaces()
        if collecting:
            gc.enable()


def clear_workspaces() -> None:
    """Frees cuBLAS's workspaces; PyTorch makes new ones on demand. No cuBLAS kernel may be running."""
    _call_if_known("_cuda_clearCublasWorkspaces")


def _leave_pool(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Releases the pool of a failed capture: PyTorch counts that among its users forever."""
    with suppress(RuntimeError):
        graph.pool()  # RuntimeError: the capture did not end; of one that did, the graph releases the pool
        return
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):  # RuntimeError: PyTorch has done this already
        _call_if_known(name, torch.cuda.current_device(), pool)


def _call_if_known(name: str, *args: Any) -> None:
    """Calls a private function of PyTorch, in the versions that have it."""
    if (function := getattr(torch._C, name, None)) is not None:
        with suppress(RuntimeError):
            function(*args)


class Constants(TorchFunctionMode):
    """The constants that a forward makes on the CPU and copies to the device. They follow from Python values, so they
    are the same in every replay. A graph can copy them from pinned memory, which a capture may not allocate: the
    warm-up pins them, and the capture finds the same ones again.

    In a capture raises RuntimeError where a constant differs from the warm-up's, or where they exceed MAX_BYTES."""

    MAX_BYTES = 64 << 20

    def __init__(self, pin: Callable[[Tensor], Tensor] = Tensor.pin_memory) -> None:
        super().__init__()
        self._pin = pin
        self._pinned: list[Tensor] = []
        self._replayed: int | None = None  # constants seen so far in a capture; None in a warm-up

    def for_capture(self) -> Constants:
        """Returns itself, to check the constants of a capture."""
        if self._is_over_limit:
            raise RuntimeError(f"its forward sends more than {self.MAX_BYTES >> 20} MiB from main memory")
        self._replayed = 0
        return self

    @property
    def _is_over_limit(self) -> bool:
        return sum(pinned.nbytes for pinned in self._pinned) > self.MAX_BYTES

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor):
            return self._make(func, *args, **kwargs)
        if not args or not torch.is_tensor(args[0]):
            return func(*args, **kwargs)
        return (self._on_device_tensor if _is_device(args[0].device) else self._on_cpu_tensor)(func, *args, **kwargs)

    def _on_device_tensor(self, func: Any, first: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Returns a function of a device tensor, whose other arguments may be copied to the device."""
        if func is Tensor.new_tensor and not any(map(torch.is_tensor, (*args, *kwargs.values()))):
            named = {name: value for name, value in kwargs.items() if value is not None}
            return self._make(torch.tensor, *args, **({"dtype": first.dtype, "device": first.device} | named))
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            args = (self._index(args[0], first.device), *args[1:])
        if func in (Tensor.__setitem__, Tensor.copy_) and args and _is_cpu_tensor(args[-1]):
            args = (*args[:-1], self._send(args[-1], first.device))
        return func(first, *args, **kwargs)

    def _on_cpu_tensor(self, func: Any, first: Tensor, *args: Any, **kwargs: Any) -> Any:
        if func is Tensor.to:
            named = {name: value for name, value in kwargs.items() if name != "copy"}
            device, dtype, _, layout = torch._C._nn._parse_to(*args, **named)
            if _is_device(device):
                sent = self._send(first, device)
                return sent.to(dtype=dtype or sent.dtype, memory_format=layout or torch.preserve_format)
        if func is Tensor.type_as and _is_device(args[0].device):
            return self._send(first, args[0].device).to(args[0].dtype)
        if func is Tensor.cuda:
            return self._pin_or_check(first).cuda(*args, **{**kwargs, "non_blocking": True})
        return func(first, *args, **kwargs)

    def _make(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls `func`, torch.tensor or torch.as_tensor, of Python numbers."""
        device = kwargs.get("device")
        if torch.is_tensor(args[0] if args else kwargs.get("data")) or not _is_device(device):
            return func(*args, **kwargs)
        return self._send(func(*args, **{**kwargs, "device": "cpu"}), device)

    def _index(self, index: Any, device: Any) -> Any:
        """Returns the index with its CPU tensors on `device`."""
        # A mask stays: its size would come from the device. So does a single number, which PyTorch reads on the CPU.
        if isinstance(index, tuple):
            return tuple(self._index(each, device) for each in index)
        if isinstance(index, list) and index and all(type(each) is int for each in index):
            index = torch.tensor(index)
        if _is_cpu_tensor(index) and index.ndim and index.dtype != torch.bool:
            return self._send(index, device)
        return index

    def _send(self, constant: Tensor, device: Any) -> Tensor:
        return self._pin_or_check(constant).to(device, non_blocking=True)

    def _pin_or_check(self, constant: Tensor) -> Tensor:
        if self._replayed is None:
            if not self._is_over_limit:
                self._pinned.append(self._pin(constant))
            return constant
        self._replayed += 1
        if self._replayed > len(self._pinned) or not torch.equal(pinned := self._pinned[self._replayed - 1], constant):
            raise RuntimeError("its forward sends other numbers from main memory each time")
        return pinned


def cached_results(network: nn.Module) -> list[Tensor]:
    """Returns the tensors in lru_caches of methods of the network's modules: other networks may evict them."""
    kinds = {kind for module in network.modules() for kind in type(module).__mro__}
    caches = [value for kind in kinds for value in vars(kind).values() if isinstance(value, LRU_CACHE)]
    return [value for cache in caches for value in gc.get_referents(cache) if isinstance(value, Tensor)]


def _is_cpu_tensor(value: Any) -> bool:
    return torch.is_tensor(value) and value.device.type == "cpu"


def _is_device(device: Any) -> bool:
    return device is not None and torch.device(device).type != "cpu"


def recorder_for(device: torch.device) -> Recorder | None:
    """Returns a Recorder on CUDA; None on other devices."""
    return Recorder() if device.type == "cuda" else None


def compile_blocks(blocks: Iterable[nn.Module], compilation: Compilation) -> Callable[[], None]:
    """Compiles each block's forward, or what ComfyUI's `forward` calls between wrappers; returns what undoes that."""
    torch.compiler.reset()  # earlier graphs may be of the same code with other splits
    compiled = [(block, "_forward" if hasattr(block, "_forward") else "forward") for block in blocks]
    # Not the modules: their hooks would become part of the graph, and ours note what they split in objects that a graph
    # changes only when it has ended.
    options, mode = json.loads(compilation.options), compilation.mode
    if mode is not None and options and compilation.backend == "inductor":  # which takes one or the other
        options, mode = torch._inductor.list_mode_options(mode) | options, None
    for block, name in compiled:
        forward = torch.compile(
            getattr(block, name), backend=compilation.backend, mode=mode, options=options or None,
            fullgraph=compilation.fullgraph, dynamic=compilation.dynamic,
        )  # fmt: skip
        setattr(block, name, _refusing(forward, compilation.backend))

    def undo() -> None:
        for block, name in compiled:
            vars(block).pop(name, None)

    return undo


def _refusing(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        # Code would be compiled anew for the mode of Constants.
        has_mode = isinstance(_get_current_function_mode(), Constants)
        try:
            with _pop_mode_temporarily() if has_mode else nullcontext():
                return forward(*args, **kwargs)
        except BackendCompilerFailed as failed:
            error = str(failed.inner_exception)
            raise Refused("compile.failed", widget="compile", backend=str(backend), error=error) from failed

    return call


def warm_compiler() -> None:
    """Imports the compiler and starts its processes, which takes seconds, while the host prepares the first run."""
    importlib.import_module("torch._inductor.compile_fx")
    importlib.import_module("torch._inductor.async_compile").AsyncCompile.warm_pool()


@contextmanager
def reporting_compilation(compiling: Callable[[bool], None]) -> Iterator[None]:
    """Calls `compiling(True)` when the compilation of a graph begins in this context, `compiling(False)` at its end."""

    on_start, on_end = (lambda _: compiling(True)), (lambda _: compiling(False))
    callback_handler.register_start_callback(on_start)
    callback_handler.register_end_callback(on_end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(on_start)
        callback_handler.remove_end_callback(on_end)
