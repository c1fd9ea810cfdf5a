"""The modules of a network that its plan names. Knows no network and no ranks."""

from __future__ import annotations

from torch import nn

from .plan import Plan, Site

Stack = nn.ModuleList | nn.ModuleDict


def blocks_of(network: nn.Module, plan: Plan, *, carrying: bool = False) -> list[nn.Module]:
    """The modules of the plan's stacks, in the order in which they run; `carrying`: those that its tokens pass."""
    sites = [site for site in plan.sites if site.name and "*" not in site.name and (site.carries or not carrying)]
    stacks = [network.get_submodule(site.name) for site in sites]
    return [block for stack in stacks if isinstance(stack, Stack) for block in stack.children()]


def modules_of(network: nn.Module, site: Site) -> list[nn.Module]:
    """The modules of a site; ValueError where the network has not what the plan names."""
    stack, _, below = site.name.partition(".*.")
    try:
        found = network.get_submodule(stack)
        modules = list(found.children()) if isinstance(found, Stack) else [found]
        return [module.get_submodule(below) for module in modules]
    except AttributeError as missing:
        raise ValueError(f"the plan names {site.name!r}, which {type(network).__name__} does not have") from missing
