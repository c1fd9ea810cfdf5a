"""What differs between networks: one small file each. Whatever Network a file here makes is known. Imports no torch.

A network is known by its class. One without a plan runs undivided.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from .network import Network

__all__ = ["NETWORKS", "Network", "network_of"]

_FILES = [import_module(f".{file.name}", __name__) for file in iter_modules(__path__)]
NETWORKS = tuple(found for file in _FILES for found in vars(file).values() if isinstance(found, Network))
_BY_CLASS = {kind: network for network in NETWORKS for kind in network.kinds}


def network_of(network: object) -> Network | None:
    """The plan and the figures of a network's class; None for one without a plan.

    A subclass is another class, whatever it changes: nobody has compared it with the plan.
    """
    kind = type(network)
    found = _BY_CLASS.get(f"{kind.__module__}:{kind.__qualname__}")
    return found if found is not None and found.fits(network) else None
