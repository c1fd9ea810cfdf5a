"""Finds what a pack's code puts onto a split network during a run, in place of its methods or modules: it would compute
with a part of the tokens."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...errors import Refused


class Unchanged:
    """What a network's modules, and the code of their classes and of torch's layers, are as a run begins."""

    def __init__(self, network: nn.Module) -> None:
        self._network, self._before, self._code = network, _modules(network), _code_of(network)

    def check(self) -> None:
        """Raises Refused, on every rank alike, for a module that is another one by now, or has other methods."""
        now = _modules(self._network)
        changed = next((name for name in now if now[name] != self._before.get(name)), None)
        if changed is not None:
            raise Refused("network.meanwhile", what=changed or type(self._network).__name__)
        replaced = next(
            (place for place, code in _code_of(self._network).items() if code is not self._code.get(place)), None
        )
        if replaced is not None:
            owner, name = replaced
            raise Refused("network.meanwhile", what=f"{owner.__name__}.{name}")


def _modules(network: nn.Module) -> dict[str, Any]:
    """Returns for each module its class, and which methods of its own and children it has. ComfyUI leaves the class's
    methods on modules that it has unpatched, so names alone do not tell."""
    return {name: (type(module), _own_methods(module), [*map(id, module._modules.values())])
            for name, module in network.named_modules()}  # fmt: skip


def _code_of(network: nn.Module) -> dict[tuple[Any, str], Any]:
    """Returns by owner and name the methods of the modules' classes, torch's among them, and what torch's layers call:
    a split network runs other code than these in places."""
    owners = {base for module in network.modules() for base in type(module).__mro__} | {nn.functional}
    return {(owner, name): code for owner in owners for name, code in vars(owner).items() if callable(code)}


def _own_methods(module: nn.Module) -> list[tuple[str, int]]:
    kind = type(module)
    return [(name, id(value)) for name, value in vars(module).items() if callable(value) and hasattr(kind, name)]
