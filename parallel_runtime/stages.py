"""A network's blocks in the order in which they run, cut into the stages of a pipeline. Knows no ranks and no format.

Host and workers go by the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from .blocks import Stack
from .errors import Refused
from .loads import Load, share_out
from .networks import Network
from .plan import Plan, Site
from .specs import Parallelism


@dataclass(frozen=True, eq=False)
class Seat:
    """Where a block sits in its network: in a stack that a site of the plan names."""

    site: Site
    stack: Stack
    name: str

    @property
    def block(self) -> nn.Module:
        found = self.stack._modules[self.name]
        assert found is not None
        return found

    @property
    def path(self) -> str:
        """As the network calls it."""
        return f"{self.site.name}.{self.name}"


Unit = list[Seat]  # blocks that belong to one stage: one, and those that run beside it


def units_of(network: nn.Module, plan: Plan) -> list[Unit]:
    """What may be shared out among stages, in the order in which it runs; empty where nothing may."""
    units: list[Unit] = []
    first = 0  # of the last stack's units
    for site in plan.sites:
        if not (site.carries and site.given_on) or "*" in site.name:
            continue
        stack = network.get_submodule(site.name)
        if not isinstance(stack, Stack):
            continue
        seats = [Seat(site, stack, name) for name in stack._modules]
        if site.beside is None:
            first = len(units)
            units += [[seat] for seat in seats]
            continue
        for place, seat in zip(site.beside(network), seats, strict=True):
            units[first + place].append(seat)
    return units


def why_not_in_patches(plan: Plan) -> str:
    """What keeps a network's tokens from going through stages patch by patch; "" where nothing does."""
    carriers = [site for site in plan.sites if site.carries]
    for site in carriers:
        if site.gathers and site is not carriers[-1]:
            return f"{site.name} need the whole sequence"
        if site.gathers == "each":
            return f"between its {site.name} the whole sequence is needed"
        if site.beside or {name for name, *_ in site.carries} - set(site.given_on):
            return f"{site.name} keep more than tokens for later blocks"
        if site.again:
            return f"{site.name} run several times in an evaluation"
        if "attention_mask" in site.args:
            return f"{site.name} cut their attention mask as they cut tokens"
    if framed := [site.name for site in plan.sites if site.frames]:
        return f"{framed[0]} needs whole frames"
    if plan.replicated:
        return f"its {', '.join(sorted(plan.replicated))} is whole in every block"
    if others := sorted(plan.streams - {plan.main, "text"}):
        return f"its {', '.join(others)} is a sequence beside the {plan.main}"
    return ""


def counts_of(network: nn.Module, known: Network, parallelism: Parallelism) -> tuple[int, ...]:
    """How many units each stage has. Raises Refused where they cannot be shared out so."""
    units, stages = units_of(network, known.plan), parallelism.pipeline_degree
    if parallelism.patches > 1 and (why := why_not_in_patches(known.plan)):
        raise Refused(f"{known.name} has no patches, as {why}; set patches to 1")
    if not units:
        raise Refused(f"the blocks of {known.name} cannot be cut into stages; set pipeline_degree to 1")
    if stages > len(units):
        raise Refused(f"{known.name} has {len(units)} blocks for {stages} stages; set pipeline_degree to {len(units)}")
    counts = parallelism.stages or share_out([Load(0, len(unit)) for unit in units], stages)
    if sum(counts) != len(units):
        raise Refused(f"stages of {counts} blocks are not those of {known.name}, which has {len(units)}")
    return counts


def owners(counts: Sequence[int]) -> list[int]:
    """The stage of each unit."""
    return [stage for stage, count in enumerate(counts) for _ in range(count)]
