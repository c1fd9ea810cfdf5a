"""Blocks compiled one by one, with what cuts them left outside of their graphs. Knows no model."""

from __future__ import annotations

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
from .graphs import unwatched


def compile_blocks(blocks: Iterable[nn.Module], compilation: Compilation) -> Callable[[], None]:
    """Compile the forward of each block; what is returned makes them eager again.

    The forward, and not the module: a module's hooks would become part of its graph, and ours note what they cut in
    objects that a graph changes only when it has ended. Graphs that were made before go: they may be of the same code,
    cut otherwise.
    """
    torch.compiler.reset()
    compiled = list(blocks)
    for block in compiled:
        block.forward = _or_refused(torch.compile(block.forward, **_words(compilation)), compilation.backend)

    def undo() -> None:
        for block in compiled:
            vars(block).pop("forward", None)

    return undo


def _words(compilation: Compilation) -> dict[str, Any]:
    """torch.compile takes a mode or options; a mode of its own backend stands for options."""
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


def _or_refused(forward: Callable[..., Any], backend: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with unwatched():
                return forward(*args, **kwargs)
        except BackendCompilerFailed as failed:
            raise Refused(
                f"torch.compile with {backend} failed on this machine: {failed.inner_exception}; set compile to off, "
                "or take Torch Compile Model away"
            ) from failed

    return call


@contextmanager
def telling(compiling: Callable[[bool], None]) -> Iterator[None]:
    """In here each graph tells when its compilation begins (True), and when it is done."""

    def begins(_: Any) -> None:
        compiling(True)

    def ends(_: Any) -> None:
        compiling(False)

    callback_handler.register_start_callback(begins)
    callback_handler.register_end_callback(ends)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begins)
        callback_handler.remove_end_callback(ends)
