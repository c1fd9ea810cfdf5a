"""Blocks compiled one by one, with what cuts them left outside of their graphs. Knows no model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


def compile_blocks(blocks: Iterable[nn.Module], **options: Any) -> Callable[[], None]:
    """Compile the forward of each block, with torch.compile's `options`; what is returned makes them eager again.

    The forward, and not the module: a module's hooks would become part of its graph, and ours note what they cut in
    objects that a graph changes only when it has ended.
    """
    compiled = list(blocks)
    for block in compiled:
        block.forward = torch.compile(block.forward, **options)

    def undo() -> None:
        for block in compiled:
            vars(block).pop("forward", None)

    return undo
