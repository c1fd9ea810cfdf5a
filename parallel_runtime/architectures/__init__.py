"""How each network is split: the words in which that is written, and plans of architectures by what tokens they have.

A network is known by its class. One without a plan runs undivided. Plans need no torch."""

from importlib import import_module
from pkgutil import iter_modules

from .architecture import Architecture

__all__ = ["ARCHITECTURES", "Architecture", "architecture_of"]

_FILES = [import_module(f".{file.name}", __name__) for file in iter_modules(__path__)]
ARCHITECTURES = tuple(value for file in _FILES for value in vars(file).values() if isinstance(value, Architecture))
_BY_CLASS = {kind: network for network in ARCHITECTURES for kind in network.kinds}


def architecture_of(network: object) -> Architecture | None:
    """The plan and the figures of a network's class; None for one without a plan."""
    # A subclass is another class, whatever it changes: nobody has compared it with the plan.
    kind = type(network)
    known = _BY_CLASS.get(f"{kind.__module__}:{kind.__qualname__}")
    return known if known is not None and known.fits(network) else None
