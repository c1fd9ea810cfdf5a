"""The words in which is written how a network is cut over ranks: what becomes of its blocks' arguments, and over which
streams of tokens its attention runs. Names are the network's own. Knows no model, no torch and no ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

Names = tuple[str, ...]  # of streams, in the order in which they are concatenated
IMAGE, TEXT, VIDEO, AUDIO, JOINT = ("image",), ("text",), ("video",), ("audio",), ("joint",)  # joint: text and image
Local = Literal["local"]


@dataclass(frozen=True)
class Tokens:
    """Hidden states: cut where they come whole, left where they are cut; their length tells which.

    The first sight of a stream in a forward sets its length. `flat` dims from `dim` on are one row of tokens: with 3,
    [B, T, H, W, C] becomes [B, own tokens, 1, 1, C]. `again`: blocks run several times in a forward, from whole tokens
    to whole tokens; each time the length may be another.
    """

    streams: Names
    dim: int = 1
    flat: int = 1
    again: bool = False


@dataclass(frozen=True)
class Along:
    """What goes along with streams and comes whole to every block: positions, masks, modulation. Size 1 stays.

    `per`: entries may stand for several tokens each, such as a frame's; they are repeated first. `at_end`: there may be
    fewer, which go with the last tokens. `ndim`: only tensors of so many dims (None: all). In a list or tuple each is
    cut.
    """

    streams: Names
    dim: int = 1
    per: bool = False
    at_end: bool = False
    ndim: int | None = None


@dataclass(frozen=True)
class Slices:
    """Ranges (start, end, ...) of positions in the whole streams; streams that are held before it go in `after`.

    What is said of each position of a range, a tensor after start and end, is cut with it.
    """

    streams: Names
    after: Names = ()


@dataclass(frozen=True)
class Index:
    """A number that is a position in a whole stream, or how many tokens there are from one to its end."""

    stream: str
    to_end: bool = False


@dataclass(frozen=True)
class Count:
    """How many tokens there are of streams: a number, or the length of a tensor along `dim`. It stays as it is.

    For streams that no tokens of their own show. All but one of several are known by then; that one is the rest.
    """

    streams: Names
    dim: int = -1


@dataclass(frozen=True)
class Whole:
    """Chunks that are put together again."""

    streams: Names
    dim: int = 1


@dataclass(frozen=True, kw_only=True)
class Cross:
    """An attention whose queries and keys are of different streams."""

    queries: Names
    keys: Names


@dataclass(frozen=True, kw_only=True)
class Window:
    """An attention in which tokens see those that are near: so many on each side as an attribute of the module says,
    and all if it is None. The mask that the module makes of the tokens it is given is passed over.
    """

    streams: Names
    width: str | int  # the attribute, or what it says


@dataclass(frozen=True, kw_only=True)
class Frames:
    """A module that reshapes its `tokens` by frames, and reads `conditions` frame by frame; all are arguments.

    A rank's part of the stream may begin inside of a frame: for the module it is filled up to whole frames with zeros,
    which are dropped from what it returns. It is given the conditions of these frames alone, along dim 1, `each`
    entries a frame. `until` says how many tokens are of frames, from the first on; where no argument does, all are.
    """

    stream: str
    tokens: str
    conditions: Names
    each: int = 1
    until: str | None = None


# What becomes of an argument: a word, one for each item of a tuple, one of a list as the value's length tells, None to
# leave it, or a function of the value and of `cut`, which takes a value and its word.
Word = (
    Tokens
    | Along
    | Slices
    | Index
    | Count
    | Whole
    | tuple[Any, ...]
    | list[Any]
    | Callable[[Any, Callable[[Any, Any], Any]], Any]
    | None
)
Over = Names | Cross | Window | Local
Attends = Over | list[Over]  # several are told apart by their lengths


@dataclass(frozen=True)
class Site:
    """A list of blocks, or a single module; "" is the network itself, and `*` in a name stands for all of a list.

    `args` says what becomes of its arguments, by name or position, and `whole` names those that stay as they are;
    blocks that are given any other are refused. `attends`: the streams of the attention inside; `within` says it for
    modules below, by name, where a block has them. `gathers`: the last block's outputs are made whole, or those of each
    block, where the network's own code between blocks needs it. `returns` are the streams of what blocks return, if not
    of what it `gives`. `frames`: blocks that reshape their tokens by frames. `aside`: beside the trunk; first-block
    caching leaves it alone.

    `gives` names the arguments that a block's outputs go on from, in order: those with Tokens where it is None. A block
    of another stage of a pipeline gives what has their shapes; with none, (), every stage has all of these blocks.
    `beside`: they are not in turn behind the stack before, but each belongs to the stage of the block at this place.
    """

    name: str
    args: Mapping[str | int, Word] = field(default_factory=dict)
    attends: Attends | None = None
    within: Mapping[str, Attends] = field(default_factory=dict)
    whole: Names = ()
    gathers: bool | Literal["each"] = False
    returns: tuple[Names, ...] | None = None
    frames: Frames | None = None
    aside: bool = False
    gives: tuple[str | int, ...] | None = None
    beside: Callable[[Any], Sequence[int]] | None = None

    @property
    def carries(self) -> list[tuple[str | int, int | None, Names]]:
        """The hidden states among the arguments: name, index if it is one of a tuple, streams."""
        return [(name, index, words[0].streams) for name, index, words in self._tokens]

    @property
    def outputs(self) -> tuple[list[Tokens], ...]:
        """What a block returns; several words for one output are told apart by their lengths."""
        if self.returns is not None:
            return tuple([Tokens(streams)] for streams in self.returns)
        given = {name: [words for other, _, words in self._tokens if other == name] for name in self.args}
        return tuple(words for name in self.given_on or given for words in given[name])

    @property
    def given_on(self) -> tuple[str | int, ...]:
        """The arguments that what a block gives goes on from."""
        return tuple(dict.fromkeys(name for name, *_ in self._tokens)) if self.gives is None else self.gives

    @property
    def again(self) -> bool:
        """Do its blocks run several times in a forward?"""
        return any(word.again for *_, words in self._tokens for word in words)

    @property
    def _tokens(self) -> list[tuple[str | int, int | None, list[Tokens]]]:
        return [found for name, word in self.args.items() for found in _tokens(name, word)]


@dataclass(frozen=True)
class Plan:
    """A network's sites in the order in which they run.

    A ControlNet's `residuals` of these kinds are cut like the `main` stream; others are added to whole tokens.
    `replicated` streams stay whole on every rank, and only the work of attention on them is shared out. `no_options`
    are modules (Python's) whose attention gets no transformer_options.
    """

    sites: tuple[Site, ...]
    residuals: Names = ("input", "output")
    replicated: frozenset[str] = frozenset()
    no_options: Names = ()

    def __post_init__(self) -> None:
        if strangers := self.replicated - self.streams:
            raise ValueError(
                f"the plan cuts no stream {', '.join(sorted(strangers))} that could be replicated; it cuts "
                f"{', '.join(sorted(self.streams))}"
            )

    @cached_property
    def main(self) -> str:
        """The stream of the latent: of those that the last stack carries, the first that is not a prompt's."""
        *_, last = (site for site in self.sites if site.carries)
        carried = (stream for *_, streams in last.carries for stream in streams)
        return next(stream for stream in carried if stream not in self.replicated.union(TEXT))

    @property
    def streams(self) -> frozenset[str]:
        """The names of all streams that are cut, or counted."""
        carried = (stream for site in self.sites for *_, streams in site.carries for stream in streams)
        words = (word for site in self.sites for word in site.args.values())
        return frozenset(carried).union(*(word.streams for word in words if isinstance(word, Count)))

    @property
    def trunk(self) -> list[Site]:
        """The stacks of blocks that first-block caching may skip."""
        return [site for site in self.sites if site.carries and not site.aside]


def _tokens(name: str | int, word: Word) -> Iterator[tuple[str | int, int | None, list[Tokens]]]:
    words: list[tuple[int | None, Any]] = list(enumerate(word)) if isinstance(word, tuple) else [(None, word)]
    for index, item in words:
        either = item if isinstance(item, list) else [item]
        if isinstance(either[0], Tokens):
            yield name, index, either
