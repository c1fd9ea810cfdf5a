"""An architecture: its classes, its split plan, and the sizes that planning reads from a network; then shares of its
blocks that cost about the same. Imports no torch.

Sizes are read from attributes of the network, which may be without weights."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain, pairwise
from math import prod
from typing import Any

from .split_plan import JOINT, ModulePlan, Names, SplitPlan

HEADS = ("num_heads", "num_attention_heads", "n_heads", "heads")  # what networks and their blocks call them
WIDTH = ("hidden_size", "inner_dim", "dim", "model_channels", "model_dim")


def _patch_size(net: Any) -> Sequence[int]:
    """The patch size in (frames, rows, columns); a single number is that of rows and columns."""
    size = net.patch_size
    return (1, size, size) if isinstance(size, int) else size


def _number(names: Sequence[str], modules: Iterable[Any]) -> int:
    """The first integer attribute with one of these names, module by module."""
    values = (getattr(module, name, None) for module in modules for name in names)
    return next(number for number in values if isinstance(number, int))


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture. `kinds` are its classes, "module:qualified name".

    `patch`: how many of a latent's last dims (frames, rows, columns) make a token, or what says so of a network; its
    `patch_size` where nothing is said. `width`: heads x head size, where the network does not have it under a name of
    WIDTH; `head_size`, where neither it nor its blocks have the number of heads. `prompt`: the stream of the text's
    tokens, if the plan splits it. `text_width` and `pooled_width` are those of a prompt, None where the network does
    not say. `fits`: whether the plan is for this one of the class; it runs undivided if not. `batch_coupled`: whether
    this one's result depends on where prompts and images are in its batch, which ranks must not share out then.
    `images_coupled`: whether the images of a prompt are computed together, as frames that attend to each other are, so
    that ranks may share out prompts and not images."""

    name: str
    kinds: Names
    plan: SplitPlan
    patch: Sequence[int] | Callable[[Any], Sequence[int]] = _patch_size
    prompt: str = "text"
    width: Callable[[Any], int] = lambda net: _number(WIDTH, [net])
    head_size: Callable[[Any], int] | None = None
    text_width: Callable[[Any], int | None] = lambda net: None
    pooled_width: Callable[[Any], int | None] = lambda net: None
    fits: Callable[[Any], bool] = lambda net: True
    batch_coupled: Callable[[Any], bool] = lambda net: False
    images_coupled: Callable[[Any], bool] = lambda net: False

    def layers(self, net: Any) -> int:
        """Blocks with attention that run in turn; of those that run with others, such as have the latent's tokens."""
        main = self.plan.main_stream
        plans = (one for one in self._attending if not one.runs_with or any(main in of for *_, of in one.split_args))
        return sum(len(net.get_submodule(module_plan.name)) for module_plan in plans)

    def heads(self, net: Any) -> int:
        """Attention heads: an attribute of the network, or of the first submodule of its blocks that has one."""
        if self.head_size is not None:
            return self.width(net) // self.head_size(net)
        parts = (part for module_plan in self._attending for part in net.get_submodule(module_plan.name).modules())
        return _number(HEADS, chain([net], parts))

    def tokens(self, net: Any, latent_shape: Sequence[int], text: int) -> dict[str, int]:
        """Tokens of each split stream, for a latent of shape [B, C, (T,) H, W] and `text` tokens of text."""
        patch = self.patch(net) if callable(self.patch) else self.patch
        sides = zip(reversed(latent_shape[2:]), reversed(patch), strict=False)
        count = prod(-(-size // side) for size, side in sides)
        if self.plan.main_stream in JOINT:
            return {self.plan.main_stream: count + text}
        return {self.plan.main_stream: count} | ({self.prompt: text} if self.prompt in self.plan.streams else {})

    @property
    def _attending(self) -> list[ModulePlan]:
        plans = self.plan.module_plans
        return [plan for plan in plans if plan.split_args and plan.attends_to_split]


def inputs_of(path: str) -> Callable[[Any], int | None]:
    """Returns a function: a network's in_features of the linear layer at `path`, None for a network without it."""

    def width(net: Any) -> int | None:
        for part in path.split("."):
            net = getattr(net, part, None)
        return getattr(net, "in_features", None)

    return width


@dataclass(frozen=True)
class Load:
    """The cost of a unit to its stage: bytes of weights, and blocks that tokens pass, all of the same cost."""

    nbytes: int
    blocks: int = 1


def share_out(loads: Sequence[Load], stages: int, budget_bytes: Sequence[int] = ()) -> tuple[int, ...]:
    """How many units each stage has, contiguous and at least one, so that the busiest stage has the fewest blocks,
    and of such divisions the fewest bytes. No stage exceeds its entry of `budget_bytes` if that is possible.
    Raises ValueError for more stages than units."""
    if stages > len(loads):
        raise ValueError(f"{len(loads)} blocks make no {stages} stages")
    nbytes_before = tuple(accumulate((load.nbytes for load in loads), initial=0))
    work = tuple(accumulate((load.blocks for load in loads), initial=0))

    def cost(begin: int, end: int, stage: int) -> tuple[int, int, int]:
        nbytes = nbytes_before[end] - nbytes_before[begin]
        return (max(0, nbytes - budget_bytes[stage]) if budget_bytes else 0), work[end] - work[begin], nbytes

    @cache
    def best(end: int, parts: int) -> tuple[tuple[int, int, int], tuple[int, ...]]:
        """The worst of each cost for the first units in this many stages, and where these end."""
        if parts == 1:
            return cost(0, end, 0), (end,)
        divisions = []
        for begin in range(parts - 1, end):
            before, ends = best(begin, parts - 1)
            divisions.append((tuple(map(max, before, cost(begin, end, parts - 1))), (*ends, end)))
        return min(divisions)  # type: ignore[return-value]  # map forgets how many

    _, ends = best(len(loads), stages)
    return tuple(end - begin for begin, end in pairwise((0, *ends)))
