"""The language of split plans: how each argument of a network's blocks is split over ranks, and over which streams of
tokens its attention runs; and an architecture, which has a plan, its classes, and the sizes that planning reads from a
network. Argument names are the network's own. Knows no model, no torch and no ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any, Literal

Names = tuple[str, ...]  # of streams, in the order in which they are concatenated
IMAGE, TEXT, VIDEO, AUDIO, JOINT = ("image",), ("text",), ("video",), ("audio",), ("joint",)  # joint: text and image
HEADS = ("num_heads", "num_attention_heads", "n_heads", "heads")  # what networks and their blocks call them
WIDTH = ("hidden_size", "inner_dim", "dim", "model_channels", "model_dim")
Local = Literal["local"]


@dataclass(frozen=True)
class Split:
    """Hidden states: split where they are full, left where they are split already; their length tells which.

    The first tensor of a stream in a forward sets its length. `flat` dims from `dim` on are one row of tokens: with 3,
    [B, T, H, W, C] becomes [B, local tokens, 1, 1, C]. `repeats`: blocks run several times in a forward, each time from
    full tokens to full tokens, and the length may change between them."""

    streams: Names
    dim: int = 1
    flat: int = 1
    repeats: bool = False


@dataclass(frozen=True)
class SplitLike:
    """A tensor with one entry a token, full in every block, which is split like streams: positions, masks, modulation.

    A dim of size 1 is not split. `per`: an entry may stand for several tokens, such as a frame's; it is repeated first.
    `at_end`: there may be fewer entries, for the last tokens. `ndim`: only tensors with this many dims are split (None:
    all). Every tensor of a list or tuple is split."""

    streams: Names
    dim: int = 1
    per: bool = False
    at_end: bool = False
    ndim: int | None = None


@dataclass(frozen=True)
class Slices:
    """Ranges (start, end, ...) of positions in the full streams; `after`: the streams concatenated before these.

    A tensor that follows start and end has one entry a position of the range, and is split with it."""

    streams: Names
    after: Names = ()


@dataclass(frozen=True)
class Index:
    """A number: a position in the full stream or, `to_end`, the count of tokens from a position to its end."""

    stream: str
    to_end: bool = False


@dataclass(frozen=True)
class Count:
    """The global token count of streams: a number, or the length of a tensor along `dim`. It is passed unchanged.

    For streams whose length no hidden states show. Of several streams all lengths but one are known by then, and that
    one is the remainder."""

    streams: Names
    dim: int = -1


@dataclass(frozen=True)
class Gather:
    """Hidden states that are gathered from all ranks. `after`: a module that computes each token by itself, and gives
    fewer numbers for it, runs on a rank's own tokens first, and what it returns is gathered. Where it returns parts of
    the stream, `ranges` names the argument (start, end, ...) of each."""

    streams: Names
    dim: int = 1
    after: bool = False
    ranges: Names = ()


@dataclass(frozen=True, kw_only=True)
class Cross:
    """An attention whose queries and keys are of different streams."""

    queries: Names
    keys: Names


@dataclass(frozen=True, kw_only=True)
class Window:
    """An attention in which each token sees `width` tokens on each side, and all if that is None. The mask that the
    module makes from its local tokens is ignored."""

    streams: Names
    width: str | int  # the name of the module's attribute, or its value


@dataclass(frozen=True, kw_only=True)
class HeadFunction:
    """An attention function that a block is given, or calls by itself: any one that computes each head by itself, for
    it gets all tokens of this rank's heads. So such a block is split by Ulysses and never in a ring.

    Its first arguments are queries, keys and values, [B, tokens, heads, head size], [B, tokens, heads x head size] or,
    `heads_first`, [B, heads, tokens, head size]; it returns one of these. A number `heads`, or the number after the
    values, is replaced by that of this rank's heads; a tensor that has all heads in its second of four dims is narrowed
    to them. All others must be of full tokens. `streams`: None for the block's hidden states."""

    streams: Names | Cross | None = None
    heads_first: bool = False


@dataclass(frozen=True, kw_only=True)
class HeadProducer:
    """A function in the place of a block's attention `module`, which it calls like that: on hidden states [tokens,
    width], of which it makes queries, keys and values by the module's layer `qkv`, a gate by `gate` where there is one,
    and its result by `out`. It computes each head by itself, and gets all tokens and a module of this rank's heads:
    what `qkv` and `gate` give is exchanged before. The argument `full` is not split for it."""

    module: str
    qkv: str
    out: str
    gate: str
    full: str


@dataclass(frozen=True, kw_only=True)
class Frames:
    """A module that reshapes its `tokens` by frames, and reads `conditions` frame by frame; all are arguments.

    A rank's tokens may begin inside a frame: they are padded with zeros to full frames for the module, and the padding
    is dropped from its output. The module gets only the conditions of these frames, along dim 1, `each` entries a
    frame. The argument `until` counts the tokens that belong to frames, from the first on (None: all)."""

    stream: str
    tokens: str
    conditions: Names
    each: int = 1
    until: str | None = None


# How an argument is split: a spec; a tuple of specs, one an item of the value; a list of specs, of which the value's
# length selects one; None to pass it unchanged; or a function of the value and of `split(value, spec)`.
_Named = Split | SplitLike | Slices | Index | Count | Gather
SplitSpec = _Named | tuple[Any, ...] | list[Any] | Callable[[Any, Callable[[Any, Any], Any]], Any] | None
AttentionSpec = Names | Cross | Window | Local
TokenFunction = Literal["sum", "convolution"]
AttentionSpecs = AttentionSpec | list[AttentionSpec]  # the token count selects one of a list


@dataclass(frozen=True)
class ModulePlan:
    """How a list of blocks, or one module, is split. `name` is its path; "" is the network itself, and `*` in a path
    stands for every module of a list.

    `args` maps an argument's name or position to its spec, and `unsplit_args` are passed unchanged; any other tensor is
    refused. `attends`: the streams of the attention inside; `submodule_attends`: those of submodules, by their names.
    `token_functions`: submodules that read other tokens of the latent's stream without attention: a "sum" over tokens,
    as their first matrix product is in linear attention, or a "convolution" of three tokens at a time, padded by one.
    `gathers`: the last block's outputs are gathered, or with "each" those of every block, where the network's own code
    between blocks needs full tokens. `frames`: blocks that reshape their tokens by frames. `never_skipped`: no step
    cache skips these blocks. `head_functions`: attentions that are no calls of ComfyUI's, by the name of the argument
    that brings one, of a method of a block ("attn.attend") or of torch's "scaled_dot_product_attention".
    `head_producers`: those that a node may bring, by the argument of the block. `method`: what
    the network calls of its blocks, if not the blocks themselves.

    `updates` names the arguments of the next block that a block's outputs replace, in order; None: those with a Split.
    Where a block belongs to another pipeline stage, tensors of their shapes stand in for its outputs; (): every stage
    has all of these blocks. `runs_with` (for each block, the index of a block in the stack before) puts a block into
    the stage of that one; without it these blocks run after that stack."""

    name: str
    args: Mapping[str | int, SplitSpec] = field(default_factory=dict)
    attends: AttentionSpecs | None = None
    submodule_attends: Mapping[str, AttentionSpecs] = field(default_factory=dict)
    token_functions: Mapping[str, TokenFunction] = field(default_factory=dict)
    unsplit_args: Names = ()
    gathers: bool | Literal["each"] = False
    frames: Frames | None = None
    head_functions: Mapping[str, HeadFunction] = field(default_factory=dict)
    head_producers: Mapping[str, HeadProducer] = field(default_factory=dict)
    method: str = "forward"
    never_skipped: bool = False
    updates: tuple[str | int, ...] | None = None
    runs_with: Callable[[Any], Sequence[int]] | None = None

    def __post_init__(self) -> None:
        if unknown := set(self.updates or ()) - set(self.args):
            raise ValueError(f"{self.name} updates {sorted(map(str, unknown))}, which `args` does not name")

    @cached_property
    def split_args(self) -> list[tuple[str | int, int | None, Names]]:
        """The hidden states among the arguments: name, index if it is one of a tuple, streams."""
        return [(name, index, specs[0].streams) for name, index, specs in self._tokens]

    @cached_property
    def outputs(self) -> tuple[list[Split], ...]:
        """The specs of each output of a block; the output's length selects one of several."""
        names = self.updated_args or tuple(self.args)
        return tuple(specs for name in names for argument, _, specs in self._tokens if argument == name)

    @property
    def tail(self) -> Gather | None:
        """How its outputs are gathered, where it runs on split tokens behind the last blocks."""
        return next((spec for spec in self.args.values() if isinstance(spec, Gather) and spec.after), None)

    @property
    def updated_args(self) -> tuple[str | int, ...]:
        """The arguments of the next block that a block's outputs replace, in order."""
        return tuple(dict.fromkeys(name for name, *_ in self._tokens)) if self.updates is None else self.updates

    @property
    def late_args(self) -> set[str | int]:
        """The hidden states among the arguments that come from earlier blocks than the last."""
        return {name for name, *_ in self.split_args} - set(self.updated_args)

    @property
    def repeats(self) -> bool:
        """Whether its blocks run several times in a forward."""
        return any(spec.repeats for *_, specs in self._tokens for spec in specs)

    @property
    def attends_to_split(self) -> bool:
        """Whether a call of one of its blocks attends over ranks."""
        over = [self.attends, *self.submodule_attends.values()]
        return bool(self.head_functions) or any(spec is not None and spec != "local" for spec in over)

    @cached_property
    def _tokens(self) -> list[tuple[str | int, int | None, list[Split]]]:
        """The hidden states among the arguments: name, index if it is one of a tuple, specs by the value's length."""
        tokens = []
        for name, spec in self.args.items():
            items: list[tuple[int | None, Any]] = list(enumerate(spec)) if isinstance(spec, tuple) else [(None, spec)]
            for index, item in items:
                specs = item if isinstance(item, list) else [item]
                if isinstance(specs[0], Split):
                    tokens.append((name, index, specs))
        return tokens


@dataclass(frozen=True)
class SplitPlan:
    """How a network is split: the plans of its modules, in the order in which they run.

    A ControlNet's `residuals` of these kinds are split like `main_stream`; others are added to full tokens.
    `replicated` streams are full on every rank, and only their attention is shared out. `no_options` names Python
    modules whose attention gets no transformer_options. Of streams `in_turns` a network calls its blocks several times
    in a forward, each time with other tokens: a kept prompt's, then the image's. `agreed` are methods of the network
    that return what it has kept, or None, and whether that is complete: true where it is on all ranks."""

    module_plans: tuple[ModulePlan, ...]
    residuals: Names = ("input", "output")
    replicated: frozenset[str] = frozenset()
    no_options: Names = ()
    in_turns: Names = ()
    agreed: Names = ()

    def __post_init__(self) -> None:
        if unknown := self.replicated - self.streams:
            missing, split = (", ".join(sorted(names)) for names in (unknown, self.streams))
            raise ValueError(f"the plan splits no stream {missing} that could be replicated; it splits {split}")

    @cached_property
    def main_stream(self) -> str:
        """The stream of the latent: the first in the last stack's hidden states that is neither text nor replicated."""
        *_, last = (module_plan for module_plan in self.module_plans if module_plan.split_args)
        carried = (stream for *_, streams in last.split_args for stream in streams)
        return next(stream for stream in carried if stream not in self.replicated.union(TEXT))

    @property
    def streams(self) -> frozenset[str]:
        """The names of all streams that are split or counted."""
        carried = (stream for plan in self.module_plans for *_, streams in plan.split_args for stream in streams)
        specs = (spec for module_plan in self.module_plans for spec in module_plan.args.values())
        return frozenset(carried).union(*(spec.streams for spec in specs if isinstance(spec, Count)))

    @property
    def ulysses_only(self) -> str:
        """The names of the attentions that no ring can have; "" for none."""
        return ", ".join(dict.fromkeys(name for plan in self.module_plans for name in plan.head_functions))

    @property
    def trunk(self) -> list[ModulePlan]:
        """The stacks of blocks that a step cache may skip."""
        return [plan for plan in self.module_plans if plan.split_args and not plan.never_skipped]


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
    tokens, if the plan splits it. `text_width` and `pooled_width` are those of a prompt, by which those of another
    text encoder are refused; None where the network does not say. `fits`: whether the plan is for this one of the
    class; it runs undivided if not. `batch_coupled`: whether this one's result depends on where prompts and images are
    in its batch, which ranks must not share out then. `images_coupled`: whether the images of a prompt are computed
    together, as frames that attend to each other are, so that ranks may share out prompts and not images."""

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
