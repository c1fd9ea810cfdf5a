"""How each network is split: the words in which that is written, and plans of architectures by what tokens they have.

A network is known by its class. One without a plan runs undivided. Plans need no torch."""

from . import one_stream, row_plan, two_streams, videos
from .split_plan import Architecture, SplitPlan

__all__ = ["ARCHITECTURES", "Architecture", "architecture_of", "control_plan_of"]

_VALUES = [value for file in (one_stream, row_plan, two_streams, videos) for value in vars(file).values()]
ARCHITECTURES = tuple(value for value in _VALUES if isinstance(value, Architecture))
_BY_CLASS = {kind: network for network in ARCHITECTURES for kind in network.kinds}


def _class_of(network: object) -> str:
    return f"{type(network).__module__}:{type(network).__qualname__}"


def architecture_of(network: object) -> Architecture | None:
    """The plan and the figures of a network's class; None for one without a plan."""
    # A subclass is another class, whatever it changes: nobody has compared it with the plan.
    known = _BY_CLASS.get(_class_of(network))
    return known if known is not None and known.fits(network) else None


def control_plan_of(network: object) -> SplitPlan | None:
    """The plan of a ControlNet's network by the network's own class; None for one that runs undivided."""
    return two_streams.CONTROL_PLANS.get(_class_of(network))
