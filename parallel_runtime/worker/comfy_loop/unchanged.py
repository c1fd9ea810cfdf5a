"""Finds what a pack's code puts onto a split network during a run, in place of its methods or modules: it would compute
with a part of the tokens."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...errors import Refused


class Unchanged:
    """What a network's modules are as a run begins."""

    def __init__(self, network: nn.Module) -> None:
        self._network, self._before = network, _modules(network)

    def check(self) -> None:
        """Raises Refused, on every rank alike, for a module that is another one by now, or has other methods."""
        now = _modules(self._network)
        changed = next((name for name in now if now[name] != self._before.get(name)), None)
        if changed is not None:
            raise Refused("network.meanwhile", what=changed or type(self._network).__name__)


def _modules(network: nn.Module) -> dict[str, Any]:
    """Returns for each module its class, and which methods of its own and children it has. ComfyUI leaves the class's
    methods on modules that it has unpatched, so names alone do not tell."""
    return {name: (type(module), _own_methods(module), [*map(id, module._modules.values())])
            for name, module in network.named_modules()}  # fmt: skip


def _own_methods(module: nn.Module) -> list[tuple[str, int]]:
    kind = type(module)
    return [(name, id(value)) for name, value in vars(module).items() if callable(value) and hasattr(kind, name)]
