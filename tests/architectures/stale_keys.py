"""PipeFusion by its definition, in one process: each block computes patch after patch, and attends to keys and values
of all tokens, of which those of patches that come later are the last evaluation's. Uses no plan and nothing of the
engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..zoo.calls import Inputs
from .cases import forward

IMAGE, TEXT, BOTH = ("image",), ("text",), ("text", "image")
Words = dict[str, tuple[tuple[str, ...], int]]  # of a block's arguments: streams, and the dim along which they lie
FLUX: dict[str, tuple[Words, tuple[str, ...]]] = {  # of each stack: what it is given, what it returns
    "double_blocks": ({"img": (IMAGE, 1), "txt": (TEXT, 1), "pe": (BOTH, 2)}, ("img", "txt")),
    "single_blocks": ({"x": (BOTH, 1), "pe": (BOTH, 2)}, ("x",)),
}
QWEN = {
    "transformer_blocks": (
        {"encoder_hidden_states": (TEXT, 1), "hidden_states": (IMAGE, 1), "image_rotary_emb": (BOTH, 2)},
        ("encoder_hidden_states", "hidden_states"),
    )
}
STACKS: dict[str, dict[str, tuple[Words, tuple[str, ...]]]] = {
    "flux": FLUX,
    "flux, 63 text tokens": FLUX,
    "flux 2": FLUX,
    "chroma": FLUX,
    "wan": {"blocks": ({"x": (IMAGE, 1), "freqs": (IMAGE, 1)}, ("x",))},
    "qwen image": QWEN,
}
CROSS = {"wan": "cross_attn"}  # whose keys are not of these tokens


class Stale:
    """A network's blocks, evaluated so; `kept` are keys and values of a prompt, by block."""

    def __init__(self, name: str, count: int) -> None:
        self.count, self.exact = count, True
        self.kept: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        self.prompt, self.block, self.turn = 0, 0, 0
        self.lengths: dict[str, int] = {}
        self.aside = CROSS.get(name)
        self.local = False

    def parts(self, stream: str) -> list[tuple[int, int]]:
        """From and to, of a stream, of each patch."""
        text, image = self.lengths.get("text", 0), self.lengths["image"]
        if stream == "text":
            return [(0, text)] + [(text, text)] * (self.count - 1)
        sizes = [max(1, -(-(text + image) // self.count) - text)]
        while len(sizes) < self.count:
            sizes.append(-(-(image - sum(sizes)) // (self.count - len(sizes))))
        return [(sum(sizes[:n]), sum(sizes[: n + 1])) for n in range(self.count)]

    def cut(self, full: Tensor, streams: tuple[str, ...], dim: int) -> Tensor:
        """This turn's tokens; where a patch has no text, the first of it all the same: blocks want one."""
        pieces = []
        for stream, piece in zip(streams, full.split([self.lengths[s] for s in streams], dim), strict=True):
            start, end = self.parts(stream)[self.turn]
            pieces.append(piece.narrow(dim, start, end - start) if end > start else piece.narrow(dim, 0, 1))
        return torch.cat(pieces, dim)

    def attend(
        self, function: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, heads: int, *more: Any, **options: Any
    ) -> Tensor:
        if self.local:
            return function(q, k, v, heads, *more, **options)
        dim = 2 if options.get("skip_reshape") else 1
        if self.exact:
            self.kept[self.prompt][self.block] = k.clone(), v.clone()
            return function(q, k, v, heads, *more, **options)
        text = self.lengths.get("text", 0)
        no_text = bool(text and self.turn)
        start, end = self.parts("image")[self.turn]
        keys, values = self.kept[self.prompt][self.block]
        for full, own in ((keys, k), (values, v)):
            if self.turn == 0:
                full.narrow(dim, 0, text + end).copy_(own)
            else:
                full.narrow(dim, text + start, end - start).copy_(own.narrow(dim, int(no_text), end - start))
        if not no_text:
            return function(q, keys, values, heads, *more, **options)
        out = function(q.narrow(dim, 1, end - start), keys, values, heads, *more, **options)
        return torch.cat([out.new_zeros(out.shape[0], 1, *out.shape[2:]), out], 1)


@contextmanager
def by_patches(network: nn.Module, name: str, stale: Stale) -> Iterator[None]:
    undo, number = [], 0
    for stack, (words, returned) in STACKS[name].items():
        for block in network.get_submodule(stack):  # type: ignore[union-attr]
            block.forward = _in_turn(block.forward, number, words, returned, stale)
            undo.append(block)
            if stale.aside:
                cross = block.get_submodule(stale.aside)
                cross.forward = _aside(cross.forward, stale)
                undo.append(cross)
            number += 1
    try:
        yield
    finally:
        for module in undo:
            del module.forward


def _aside(own: Callable[..., Any], stale: Stale) -> Callable[..., Any]:
    def aside(*args: Any, **kwargs: Any) -> Any:
        stale.local = True
        try:
            return own(*args, **kwargs)
        finally:
            stale.local = False

    return aside


def _in_turn(
    own: Callable[..., Any], number: int, words: Words, returned: tuple[str, ...], stale: Stale
) -> Callable[..., Any]:
    def in_turn(*args: Any, **kwargs: Any) -> Any:
        if args:  # Wan's are given their tokens by place
            kwargs["x"] = args[0]
        stale.block, stale.turn = number, 0
        for name, (streams, dim) in words.items():
            if len(streams) == 1 and streams != BOTH:
                stale.lengths[streams[0]] = kwargs[name].shape[dim]
        if stale.exact:
            return own(**kwargs)
        outs: list[list[Tensor]] = []
        for turn in range(stale.count):
            stale.turn = turn
            given = {name: stale.cut(kwargs[name], *words[name]) for name in words if kwargs.get(name) is not None}
            out = own(**{**kwargs, **given})
            outs.append([out] if isinstance(out, Tensor) else list(out))
        full = [_joined([out[n] for out in outs], words[name], stale) for n, name in enumerate(returned)]
        return full[0] if len(full) == 1 else tuple(full)

    return in_turn


def _joined(parts: list[Tensor], word: tuple[tuple[str, ...], int], stale: Stale) -> Tensor:
    """Of all patches, without what stood for a text."""
    streams, dim = word
    if streams == TEXT:
        return parts[0]
    skip = int(streams == BOTH)
    return torch.cat([parts[0], *(part.narrow(dim, skip, part.shape[dim] - skip) for part in parts[1:])], dim)


def reference(network: nn.Module, name: str, steps: list[list[Inputs]], patches: int, exact: int) -> list[list[Tensor]]:
    """What each of `steps` gives for each of its prompts."""
    stale, answers = Stale(name, patches), []
    with by_patches(network, name, stale):
        for number, step in enumerate(steps):
            stale.exact = number < exact
            answers.append([])
            for stale.prompt, given in enumerate(step):
                stale.kept.setdefault(stale.prompt, {})
                answers[-1] += forward(network, given, optimized_attention_override=stale.attend)
    return answers
