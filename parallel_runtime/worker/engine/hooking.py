"""A plan's sites in a network: which module is given what, and hooks that cut values and put them together again.

They run outside of whatever wraps a module's forward (offloading, caching), in any order of attaching. Modules that
reshape their tokens by frames see the part that a rank holds filled up to whole frames; each frame there attends to
keys of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ...blocks import modules_of
from ...errors import Refused
from ...inside_blocks import goes_by_frames
from ...plan import Along, Attends, Count, Frames, Names, Plan, Site, Slices, Whole, Window, Word
from .cuts import Cuts

_ALWAYS_WHOLE = {"transformer_options"}
_Kind = inspect.Parameter


@dataclass(frozen=True, eq=False)
class Block:
    """One module of a site. `words`: argument to (its place among positional ones, what becomes of it)."""

    site: Site
    module: nn.Module
    last: bool
    words: dict[str | int, tuple[int | None, Word]]
    scopes: list[tuple[nn.Module, Attends]]
    parameters: list[str]

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refused where it is given what is neither cut nor known to be whole: silence would be a wrong result."""
        if self.site.frames is None and all(isinstance(word, Whole | Count) for _, word in self.words.values()):
            return
        given, frames = self.named(args, kwargs), self.site.frames
        framed = set() if frames is None else {frames.tokens, *frames.conditions, frames.until}
        known = self.words.keys() | set(self.site.whole) | _ALWAYS_WHOLE | framed
        if strangers := [str(name) for name, value in given.items() if value is not None and name not in known]:
            raise Refused(
                f"{self.site.name} ({type(self.module).__name__}) is given {', '.join(strangers)}, of which its plan "
                "does not know; set ring and Ulysses degrees to 1"
            )

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
        """What it is given, by name; what has none, by its place."""
        return {self.parameters[n] if n < len(self.parameters) else n: value for n, value in enumerate(args)} | kwargs

    def given(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], instead: Callable[[str | int, Any, Word], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same call with, of each argument that its plan names, what is there instead, by name, value and word."""
        positional = list(args)
        for name, (place, word) in self.words.items():
            if name in kwargs:
                kwargs[str(name)] = instead(name, kwargs[str(name)], word)
            elif place is not None and place < len(positional):
                positional[place] = instead(name, positional[place], word)
        return tuple(positional), kwargs

    def carried(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The hidden states that it is given, in the plan's order."""
        given, ours = self.named(args, kwargs), dict(zip(self.site.args, self.words, strict=True))
        values = [(given.get(ours[name]), item) for name, item, _ in self.site.carries]
        return [value if item is None or value is None else value[item] for value, item in values]


def cut_blocks(network: nn.Module, plan: Plan) -> list[Block]:
    """The modules of all sites; ValueError where the network has not what the plan names."""
    return [block for site in plan.sites for block in blocks_of_site(network, site)]


def blocks_of_site(network: nn.Module, site: Site) -> Iterator[Block]:
    modules = modules_of(network, site)
    for module in modules:
        parameters, open_ended = _parameters(module)
        words = {name: (place, word) for name, place, word in _places(site, parameters, open_ended, module)}
        scopes: list[tuple[nn.Module, Attends]] = [] if site.attends is None else [(module, site.attends)]
        below = dict(module.named_modules())
        scopes += [(below[name], _widened(over, below[name])) for name, over in site.within.items() if name in below]
        yield Block(site, module, module is modules[-1], words, scopes, parameters)


def _widened(over: Attends, module: nn.Module) -> Attends:
    if not isinstance(over, Window) or isinstance(over.width, int):
        return over
    width = getattr(module, over.width)
    return over.streams if width is None else replace(over, width=width)


def _parameters(module: nn.Module) -> tuple[list[str], bool]:
    """Names of positional arguments, and whether any others may come by name."""
    found = list(inspect.signature(type(module).forward).parameters.values())[1:]
    named = [one.name for one in found if one.kind in (_Kind.POSITIONAL_OR_KEYWORD, _Kind.KEYWORD_ONLY)]
    return named, any(one.kind == _Kind.VAR_KEYWORD for one in found)


def _places(site: Site, parameters: list[str], more: bool, module: nn.Module) -> Iterator[tuple[Any, int | None, Word]]:
    for name, word in site.args.items():
        if isinstance(name, int):
            yield parameters[name] if name < len(parameters) else name, name, word
        elif name in parameters:
            yield name, parameters.index(name), word
        elif more:
            yield name, None, word
        else:
            raise ValueError(
                f"the plan names argument {name!r} of {site.name} ({type(module).__name__}), whose forward takes "
                f"{', '.join(parameters)}"
            )


def hook(block: Block, cuts: Cuts) -> list[RemovableHandle]:
    """Have what `block` is given cut, and what it returns made whole where its plan or the forward asks for it."""
    handles = [] if block.site.frames is None else _frame(block, block.site.frames, cuts)
    if block.words:
        handles.append(block.module.register_forward_pre_hook(partial(_cut, block, cuts), with_kwargs=True))
    if block.site.outputs:
        handles.append(block.module.register_forward_hook(partial(_join, block, cuts)))
    return handles


@torch.compiler.disable
def _cut(block: Block, cuts: Cuts, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    block.check(args, kwargs)
    cut = block.given(args, kwargs, lambda name, value, word: cuts.cut(value, word, f"{block.site.name}({name})"))
    cuts.leave()
    if cuts.patched_inside and "transformer_options" in kwargs:
        kwargs["transformer_options"] = _of_own_tokens(kwargs["transformer_options"], block.site, cuts)
    return cut


@torch.compiler.disable
def _join(block: Block, cuts: Cuts, _: nn.Module, __: Any, output: Any) -> Any:
    if not (cuts.whole_between or (block.last and block.site.gathers) or block.site.gathers == "each"):
        return None
    outputs = [output] if isinstance(output, Tensor) else list(output)
    for at, words in enumerate(block.site.outputs):
        where = f"output {at} of {block.site.name}"
        word = words[0] if len(words) == 1 else cuts.fitting(outputs[at], words, where)
        outputs[at] = cuts.join(outputs[at], word.streams, word.dim, where)
    cuts.leave()
    return outputs[0] if isinstance(output, Tensor) else type(output)(outputs)


def _of_own_tokens(options: dict[str, Any], site: Site, cuts: Cuts) -> dict[str, Any]:
    """transformer_options in which positions in whole streams (`img_slice`), and what a model patch keeps for each
    token (`model_patch_data`), are of what this rank holds."""
    own, over = dict(options), site.attends
    places = options.get("img_slice")
    if places and isinstance(over, tuple) and places[1] == cuts.total(over):
        own["img_slice"] = list(cuts.cut([tuple(places)], Slices(over), "img_slice")[0])
    if not site.carries:
        return own
    (_, _, streams), *_ = site.carries
    own["patches"] = {
        kind: [partial(_of_frames, patch, cuts, streams) if goes_by_frames(patch) else patch for patch in found]
        for kind, found in options["patches"].items()
    }
    if data := options.get("model_patch_data"):
        own["model_patch_data"] = {
            patch: cuts.cut(value, Along(streams), f"model_patch_data of patch {number}")
            for number, (patch, value) in enumerate(data.items())
        }
    return own


def _of_frames(patch: Callable[[dict[str, Any]], Tensor], cuts: Cuts, streams: Names, given: dict[str, Any]) -> Tensor:
    """A patch of InfiniteTalk's on the frames that a rank has tokens of, each with its own sound."""
    options, total = given["transformer_options"], cuts.total(streams)
    frames, *plane = options["grid_sizes"]
    if total != prod(options["grid_sizes"]):
        raise Refused("InfiniteTalk with tokens that are of no frame cannot be cut by sequence; set ring and Ulysses "
                      "degrees to 1")  # fmt: skip
    part = _Part.of(cuts.first(streams[0]), cuts.held(streams), total, frames)
    sound = options["audio_embeds"][:, part.first : part.last]
    own = {**options, "grid_sizes": (part.last - part.first, *plane), "audio_embeds": sound}
    return part.drop(patch({**given, "x": part.fill(given["x"]), "transformer_options": own}))


@dataclass(frozen=True)
class _Part:
    """Held tokens in whole frames: `tokens` of them from frame `first` to `last`, behind `front` that are filled in."""

    first: int
    last: int
    front: int
    tokens: int
    size: int  # of a frame

    @classmethod
    def of(cls, start: int, held: int, tokens: int, frames: int) -> _Part:
        """Of `held` tokens from `start` on, where the first `tokens` of all are of so many `frames`."""
        size = tokens // frames
        end = min(start + held, tokens)
        if start >= end:  # none of a frame: the module still wants one
            return cls(first=0, last=1, front=0, tokens=0, size=size)
        first = start // size
        return cls(first=first, last=-(-end // size), front=start - first * size, tokens=end - start, size=size)

    @property
    def length(self) -> int:
        return (self.last - self.first) * self.size

    def fill(self, held: Tensor) -> Tensor:
        own, others = held[:, : self.tokens], held[:, self.tokens :]
        before, behind = (
            held.new_zeros(held.shape[0], count, *held.shape[2:])
            for count in (self.front, self.length - self.front - self.tokens)
        )
        return torch.cat([before, own, behind, others], 1)

    def drop(self, filled: Tensor) -> Tensor:
        return torch.cat([filled[:, self.front : self.front + self.tokens], filled[:, self.length :]], 1)


def _frame(block: Block, frames: Frames, cuts: Cuts) -> list[RemovableHandle]:
    """Have `block` see whole frames, and its caller what it passed."""
    parts: list[_Part | None] = []  # of the calls that run
    return [
        block.module.register_forward_pre_hook(partial(_fill, block, frames, cuts, parts), with_kwargs=True),
        block.module.register_forward_hook(partial(_drop, parts)),
    ]


@torch.compiler.disable
def _fill(
    block: Block, frames: Frames, cuts: Cuts, parts: list[_Part | None], _: nn.Module, args: Any, kwargs: Any
) -> Any:
    block.check(args, kwargs)
    given = block.named(args, kwargs)
    tokens, total, held = given[frames.tokens], cuts.total((frames.stream,)), cuts.held((frames.stream,))
    parts[:] = [None]
    if tokens.shape[1] != held or held == total:
        return None
    conditions = {name: given[name] for name in frames.conditions if given.get(name) is not None}
    count = next(iter(conditions.values())).shape[1] // frames.each
    part = _Part.of(cuts.first(frames.stream), held, given[frames.until] if frames.until else total, count)
    given[frames.tokens] = part.fill(tokens)
    for name, value in conditions.items():
        given[name] = value[:, part.first * frames.each : part.last * frames.each]
    if frames.until:
        given[frames.until] = part.length
    parts[:] = [part]
    return (), given


@torch.compiler.disable
def _drop(parts: list[_Part | None], _: nn.Module, __: Any, output: Tensor) -> Tensor:
    (part,) = parts
    return output if part is None else part.drop(output)
