"""The shape of a network's file: whose plan it is, and what planning asks of the network. Imports no torch.

A network is asked as an object, which may be without weights: what is asked reads its attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

from ..plan import JOINT, Names, Plan, Site

HEADS = ("num_heads", "num_attention_heads", "n_heads", "heads")  # what networks and their blocks call them
WIDTH = ("hidden_size", "inner_dim", "dim", "model_channels", "model_dim")


def _patch_size(net: Any) -> Sequence[int]:
    """Of all sides, or of rows and columns alike."""
    size = net.patch_size
    return (1, size, size) if isinstance(size, int) else size


def _number(names: Sequence[str], modules: Iterable[Any]) -> int:
    """What the first of these that has one of the names says by it."""
    said = (getattr(module, name, None) for module in modules for name in names)
    return next(number for number in said if isinstance(number, int))


@dataclass(frozen=True, kw_only=True)
class Network:
    """One architecture. `kinds` are its classes, "module:qualified name".

    `patch`: how many of a latent's last dims (frames, rows, columns) make a token, or what says so of a network; its
    `patch_size` where nothing is said. `width`: heads x head size, where the network does not have it under a name of
    WIDTH. `prompt`: the stream of the text's tokens, if the plan cuts it. `text_width` and `pooled_width` are those of
    a prompt, None where the network does not say. `fits`: whether the plan is for this one of the class; it runs
    undivided if not. `padded`: to multiples of what the latent is padded that patches between its blocks are shown.
    `together`: it goes by where prompts and images are in its batch, so that they are shared out to nobody.
    """

    name: str
    kinds: Names
    plan: Plan
    patch: Sequence[int] | Callable[[Any], Sequence[int]] = _patch_size
    prompt: str = "text"
    width: Callable[[Any], int] = lambda net: _number(WIDTH, [net])
    text_width: Callable[[Any], int | None] = lambda net: None
    pooled_width: Callable[[Any], int | None] = lambda net: None
    fits: Callable[[Any], bool] = lambda net: True
    padded: Callable[[Any], int] = lambda net: 1
    together: bool = False

    def layers(self, net: Any) -> int:
        """Blocks that run one after another and attend; of those beside others, such as have the latent's tokens."""
        main = self.plan.main
        of_latent = [site for site in self._attending if not site.beside or any(main in of for *_, of in site.carries)]
        return sum(len(net.get_submodule(site.name)) for site in of_latent)

    def heads(self, net: Any) -> int:
        """Of its attention: what the network says, or the first part of its blocks that does."""
        parts = (part for site in self._attending for part in net.get_submodule(site.name).modules())
        return _number(HEADS, chain([net], parts))

    def tokens(self, net: Any, latent_shape: Sequence[int], text: int) -> dict[str, int]:
        """What a latent of this shape, [B, C, (T,) H, W], and so much text make of the streams that are cut."""
        patch = self.patch(net) if callable(self.patch) else self.patch
        sides = zip(reversed(latent_shape[2:]), reversed(patch), strict=False)
        count = prod(-(-size // side) for size, side in sides)
        if self.plan.main in JOINT:
            return {self.plan.main: count + text}
        return {self.plan.main: count} | ({self.prompt: text} if self.prompt in self.plan.streams else {})

    @property
    def _attending(self) -> list[Site]:
        return [site for site in self.plan.sites if site.carries and (site.attends or site.within)]


def inputs_of(path: str) -> Callable[[Any], int | None]:
    """How wide what this linear layer takes is; None for a network without it."""

    def width(net: Any) -> int | None:
        for part in path.split("."):
            net = getattr(net, part, None)
        return getattr(net, "in_features", None)

    return width
