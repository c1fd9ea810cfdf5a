"""The shape of a network's file: whose plan it is, and what planning asks of the network. Imports no torch.

A network is asked as an object, which may be without weights: what is asked reads its attributes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any

from ..plan import JOINT, Names, Plan


@dataclass(frozen=True, kw_only=True)
class Network:
    """One architecture. `kinds` are its classes, "module:qualified name".

    `patch`: how many of a latent's last dims (frames, rows, columns) make a token; or what says so of a network.
    `prompt`: the stream of the text's tokens, if the plan cuts it. `heads`: of its attention. `width`: heads x head
    size. `text_width` and `pooled_width` are those of a prompt, None where the network does not say. `fits`: whether
    the plan is for this one of the class; it runs undivided if not. `padded`: to multiples of what the latent is padded
    that patches between its blocks are shown. `together`: it goes by where prompts and images are in its batch, so that
    they are shared out to nobody.
    """

    name: str
    kinds: Names
    plan: Plan
    patch: Sequence[int] | Callable[[Any], Sequence[int]]
    prompt: str = "text"
    heads: Callable[[Any], int] = lambda net: net.num_heads
    width: Callable[[Any], int] = lambda net: net.hidden_size
    text_width: Callable[[Any], int | None] = lambda net: None
    pooled_width: Callable[[Any], int | None] = lambda net: None
    fits: Callable[[Any], bool] = lambda net: True
    padded: Callable[[Any], int] = lambda net: 1
    together: bool = False

    def layers(self, net: Any) -> int:
        """Blocks that run one after another and attend; of those beside others, such as have the latent's tokens."""
        stacks = [site for site in self.plan.sites if site.carries and (site.attends or site.within)]
        of_latent = [site for site in stacks if not site.beside or any(self.plan.main in of for *_, of in site.carries)]
        return sum(len(reduce(getattr, site.name.split("."), net)) for site in of_latent)

    def tokens(self, net: Any, latent_shape: Sequence[int], text: int) -> dict[str, int]:
        """What a latent of this shape, [B, C, (T,) H, W], and so much text make of the streams that are cut."""
        patch = self.patch(net) if callable(self.patch) else self.patch
        sides = zip(reversed(latent_shape[2:]), reversed(patch), strict=False)
        count = prod(-(-size // side) for size, side in sides)
        if self.plan.main in JOINT:
            return {self.plan.main: count + text}
        return {self.plan.main: count} | ({self.prompt: text} if self.prompt in self.plan.streams else {})


def inputs_of(path: str) -> Callable[[Any], int | None]:
    """How wide what this linear layer takes is; None for a network without it."""

    def width(net: Any) -> int | None:
        for part in path.split("."):
            net = net[int(part)] if part.isdigit() else getattr(net, part, None)
        return getattr(net, "in_features", None)

    return width
