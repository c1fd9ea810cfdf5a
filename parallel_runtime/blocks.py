"""The blocks of a network that its plan names. Knows no network and no ranks."""

from __future__ import annotations

from torch import nn

from .plan import Plan


def blocks_of(network: nn.Module, plan: Plan) -> list[nn.Module]:
    """The modules of the plan's stacks, in the order in which they run."""
    stacks = [network.get_submodule(site.name) for site in plan.sites if site.name and "*" not in site.name]
    return [block for stack in stacks if isinstance(stack, nn.ModuleList | nn.ModuleDict) for block in stack.children()]
