"""A plan's sites found in a network: which module is given what, and which of its arguments nobody has a word for."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ...errors import Refused
from ...plan import Attends, Count, Site, Whole, Window, Word

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
        given = self.named(args, kwargs)
        known = self.words.keys() | set(self.site.whole) | _ALWAYS_WHOLE | self._framed
        if strangers := [str(name) for name, value in given.items() if value is not None and name not in known]:
            raise Refused(
                f"{self.site.name} ({type(self.module).__name__}) is given {', '.join(strangers)}, of which its plan "
                "does not know; set ring and Ulysses degrees to 1"
            )

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Any, Any]:
        """What it is given, by name; what has none, by its place."""
        return {self.parameters[n] if n < len(self.parameters) else n: value for n, value in enumerate(args)} | kwargs

    @property
    def _framed(self) -> set[str | None]:
        frames = self.site.frames
        return set() if frames is None else {frames.tokens, *frames.conditions, frames.until}


def blocks_of(network: nn.Module, site: Site) -> Iterator[Block]:
    """The modules of a site; ValueError where the network has not what the plan names."""
    modules = _named(network, site.name)
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


def _named(network: nn.Module, name: str) -> list[nn.Module]:
    stack, _, below = name.partition(".*.")
    try:
        found = network.get_submodule(stack)
        modules = list(found.children()) if isinstance(found, nn.ModuleList | nn.ModuleDict) else [found]
        return [module.get_submodule(below) for module in modules]
    except AttributeError as missing:
        raise ValueError(f"the plan names {name!r}, which {type(network).__name__} does not have") from missing


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
