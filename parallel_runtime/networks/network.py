"""The shape of a network's file: whose plan it is, and what planning asks of the network. Imports no torch.

A network is asked as an object, which may be without weights: `heads`, `layers` and `tokens` read its attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..plan import Names, Plan

Tokens = Callable[[Any, Sequence[int], int], dict[str, int]]


@dataclass(frozen=True, kw_only=True)
class Network:
    """One architecture. `kinds` are its classes, "module:qualified name".

    `heads`: of its attention. `width`: heads x head size. `layers`: blocks that run one after another. `tokens`: what a
    latent of this shape, [B, C, (T,) H, W], and so many text tokens make of each stream that the plan cuts.
    `text_width` and `pooled_width` are those of a prompt, None where the network does not say. `fits`: whether the plan
    is for this one of the class; it runs undivided if not. `padded`: to multiples of what the latent is padded that
    patches between its blocks are shown.
    """

    name: str
    kinds: Names
    plan: Plan
    heads: Callable[[Any], int] = lambda net: net.num_heads
    width: Callable[[Any], int] = lambda net: net.hidden_size
    layers: Callable[[Any], int]
    tokens: Tokens
    text_width: Callable[[Any], int | None] = lambda net: None
    pooled_width: Callable[[Any], int | None] = lambda net: None
    fits: Callable[[Any], bool] = lambda net: True
    padded: Callable[[Any], int] = lambda net: 1


def inputs_of(path: str) -> Callable[[Any], int | None]:
    """How wide what this linear layer takes is; None for a network without it."""

    def width(net: Any) -> int | None:
        for part in path.split("."):
            net = net[int(part)] if part.isdigit() else getattr(net, part, None)
        return getattr(net, "in_features", None)

    return width


def layers(*stacks: str) -> Callable[[Any], int]:
    """The blocks of these lists."""
    return lambda net: sum(len(getattr(net, stack)) for stack in stacks)


def image(patch: int, text: bool = True, stream: str = "image") -> Tokens:
    """Squares of `patch` pixels, frame by frame, and the text if it is cut too."""
    return patches((1, patch, patch), text=text, stream=stream)


def video(*patch: int, text: bool = False) -> Tokens:
    """Boxes of `patch` frames, rows and columns, and the text if it is cut too."""
    return patches(patch, text=text, stream="video")


def joint(patch: int) -> Tokens:
    """Squares of an image in one stream with the text."""
    alone = image(patch, text=False)
    return lambda net, latent_shape, text: {"joint": alone(net, latent_shape, text)["image"] + text}


def patches(patch: Sequence[int], *, text: bool, stream: str) -> Tokens:
    def tokens(_: Any, latent_shape: Sequence[int], text_tokens: int) -> dict[str, int]:
        count = 1
        for size, side in zip(reversed(latent_shape[2:]), reversed(patch), strict=False):
            count *= -(-size // side)
        return {stream: count, "text": text_tokens} if text else {stream: count}

    return tokens
