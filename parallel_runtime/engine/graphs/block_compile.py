"""Compiles blocks one by one; the hooks that split their tensors stay outside of the graphs. Knows no model."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._inductor
from torch import nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import BackendCompilerFailed

from ...errors import Refused
from ...specs import Compilation
from .cuda_graphs import without_constants


def compile_blocks(blocks: Iterable[nn.Module], compilation: Compilation) -> Callable[[], None]:
    """Compiles the forward of each block, or what ComfyUI's `forward` calls between wrappers; returns a function that
    makes them eager again.

    Compiles the forward and not the module: a module's hooks would become part of its graph, and ours note what they
    split in objects that a graph changes only when it has ended. Discards earlier graphs, which may be of the same code
    with other splits.
    """
    torch.compiler.reset()
    compiled = [(block, "_forward" if hasattr(block, "_forward") else "forward") for block in blocks]
    for block, name in compiled:
        forward = torch.compile(getattr(block, name), **_compile_arguments(compilation))
        setattr(block, name, _refusing(forward, compilation.backend))

    def undo() -> None:
        for block, name in compiled:
            vars(block).pop(name, None)

    return undo


def _compile_arguments(compilation: Compilation) -> dict[str, Any]:
    """Returns the keyword arguments of torch.compile, which takes a mode or options: inductor's modes are converted to
    options."""
    options = json.loads(compilation.options)
    mode = compilation.mode
    if mode is not None and options and compilation.backend == "inductor":
        options, mode = torch._inductor.list_mode_options(mode) | options, None
    return {
        "backend": compilation.backend,
        "mode": mode,
        "options": options or None,
        "fullgraph": compilation.fullgraph,
        "dynamic": compilation.dynamic,
    }


def _refusing(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with without_constants():
                return forward(*args, **kwargs)
        except BackendCompilerFailed as failed:
            raise Refused(
                "compile.failed", widget="compile", backend=str(backend), error=str(failed.inner_exception)
            ) from failed

    return call


def warm_compiler() -> None:
    """Imports the compiler and starts its processes, some seconds of the first compilation, while the host still
    prepares the first run."""
    importlib.import_module("torch._inductor.compile_fx")
    importlib.import_module("torch._inductor.async_compile").AsyncCompile.warm_pool()


@contextmanager
def reporting_compilation(compiling: Callable[[bool], None]) -> Iterator[None]:
    """Calls `compiling(True)` when the compilation of a graph begins in this context, `compiling(False)` when it
    ends."""

    def on_start(_: Any) -> None:
        compiling(True)

    def on_end(_: Any) -> None:
        compiling(False)

    callback_handler.register_start_callback(on_start)
    callback_handler.register_end_callback(on_end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(on_start)
        callback_handler.remove_end_callback(on_end)
