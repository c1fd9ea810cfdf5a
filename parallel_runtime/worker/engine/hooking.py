"""Torch's hooks at the inputs and outputs of a plan's blocks, where values are cut and put together again.

They run outside of whatever wraps a module's forward (offloading, caching), in any order of attaching.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .cuts import Cuts
from .framing import frame
from .sites import Block


def hook(block: Block, cuts: Cuts) -> list[RemovableHandle]:
    """Have what `block` is given cut, and what it returns made whole where its plan or the forward asks for it."""
    handles = [] if block.site.frames is None else frame(block, block.site.frames, cuts)
    if block.words:
        handles.append(block.module.register_forward_pre_hook(partial(_cut, block, cuts), with_kwargs=True))
    if block.site.outputs:
        handles.append(block.module.register_forward_hook(partial(_join, block, cuts)))
    return handles


@torch.compiler.disable
def _cut(block: Block, cuts: Cuts, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    block.check(args, kwargs)
    positional = list(args)
    for name, (place, word) in block.words.items():
        where = f"{block.site.name}({name})"
        if name in kwargs:
            kwargs[str(name)] = cuts.cut(kwargs[str(name)], word, where)
        elif place is not None and place < len(positional):
            positional[place] = cuts.cut(positional[place], word, where)
    return tuple(positional), kwargs


@torch.compiler.disable
def _join(block: Block, cuts: Cuts, _: nn.Module, __: Any, output: Any) -> Any:
    if not (cuts.whole_between or (block.last and block.site.gathers) or block.site.gathers == "each"):
        return None
    outputs = [output] if isinstance(output, Tensor) else list(output)
    for at, words in enumerate(block.site.outputs):
        where = f"output {at} of {block.site.name}"
        word = words[0] if len(words) == 1 else cuts.fitting(outputs[at], words, where)
        outputs[at] = cuts.join(outputs[at], word.streams, word.dim, where)
    return outputs[0] if isinstance(output, Tensor) else type(output)(outputs)
