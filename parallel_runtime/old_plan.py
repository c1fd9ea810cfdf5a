"""The words in which a transformer's context-parallel plan is written, and its blocks. Knows no model and no torch.

diffusers' `_cp_plan` says which tensors are cut and gathered; it does not say which cut streams an attention runs
over, which is what exactness at any size needs. A Plan says both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from . import plan

Local = Literal["local"]


@dataclass(frozen=True, kw_only=True)
class Split:
    """Cut one tensor of a module (or each of a list of them) into contiguous chunks along `dim`, one a rank.

    Chunk sizes differ by at most one. `stream` names the token stream that the tensor belongs to: everything cut under
    one name has one global length in a forward. A rank whose chunk is empty holds one stand-in token, which attention
    and gathering leave out. `dim` may count from the end. `ndim`: cut only if the tensor has this many dims (None:
    always). None values are left alone.
    """

    dim: int
    stream: str
    ndim: int | None = None


@dataclass(frozen=True, kw_only=True)
class Gather:
    """Put the chunks of a module's output back together along `dim`."""

    dim: int
    stream: str


@dataclass(frozen=True, kw_only=True)
class Cross:
    """An attention whose queries and keys are of different cut streams, each in the order of concatenation."""

    queries: tuple[str, ...]
    keys: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where a transformer's streams are cut, gathered and attended.

    Module names are as in `named_modules()`, "" is the transformer itself and `*` stands for one number
    (`transformer_blocks.*`). `inputs` maps a module to {argument name: Split}; `outputs_split` maps a module to
    {index of its output: Split}; `outputs` maps a module to the Gather of its output, or one per output index.
    `attention` maps attention modules to the streams of their queries and keys, in the order in which they are
    concatenated (a Cross where the two differ), or to "local" where keys and values are whole on every rank; modules
    that it does not name attend over `joint`. Key-padding masks are cut like the keys, or left whole. `replicated`
    streams are not cut: every rank holds them whole, and only the work of attention on them is shared out.
    """

    inputs: Mapping[str, Mapping[str, Split]] = field(default_factory=dict)
    outputs_split: Mapping[str, Mapping[int, Split]] = field(default_factory=dict)
    outputs: Mapping[str, Gather | Mapping[int, Gather]] = field(default_factory=dict)
    joint: tuple[str, ...] = ("image",)
    attention: Mapping[str, tuple[str, ...] | Cross | Local] = field(default_factory=dict)
    replicated: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if strangers := self.replicated - self.streams:
            raise ValueError(
                f"the plan cuts no stream {', '.join(sorted(strangers))} that could be replicated; it cuts "
                f"{', '.join(sorted(self.streams))}"
            )

    @property
    def streams(self) -> frozenset[str]:
        """The names of all streams that are cut."""
        of_inputs = [split for splits in self.inputs.values() for split in splits.values()]
        of_outputs = [split for splits in self.outputs_split.values() for split in splits.values()]
        return frozenset(split.stream for split in (*of_inputs, *of_outputs))

    def replicating(self, *streams: str) -> Plan:
        """This plan with `streams` whole on every rank too; ValueError for those that it does not know."""
        return replace(self, replicated=self.replicated.union(streams))


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """A transformer's blocks, as first-block caching must know them.

    `stacks` are its module lists in the order in which they run, each with the arguments that its blocks return anew,
    in that order. `watched` is the argument whose change by the first block is compared, of the cut stream `stream`.
    """

    stacks: Mapping[str, tuple[str, ...]]
    watched: str = "hidden_states"
    stream: str = "image"

    def as_plan(self) -> plan.Plan:
        """The same in the words of today."""
        return plan.Plan(
            tuple(
                plan.Site(
                    stack, {name: plan.Tokens((self.stream if name == self.watched else "other",)) for name in names}
                )
                for stack, names in self.stacks.items()
            ),
            main=self.stream,
        )
