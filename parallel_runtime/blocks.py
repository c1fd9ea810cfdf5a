"""The modules of a network: those that its plan names, and those that bring an attention along. Knows no network and no
ranks.
"""

from __future__ import annotations

from torch import nn

from .plan import Plan, Site

CHOOSES = "ComfyAttention"  # the class of modules that may
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


def own_attentions(network: nn.Module) -> dict[str, str]:
    """What modules choose themselves, a function's name, to the first of those that do: in newer versions of ComfyUI a
    checkpoint may say it for each. ComfyUI calls it only where nobody overrides attention, and tells an override
    nothing of it.
    """
    found: dict[str, str] = {}
    for path, module in network.named_modules():
        function = getattr(module, "function", None) if type(module).__name__ == CHOOSES else None
        if function is not None:
            found.setdefault(getattr(function, "__name__", type(function).__name__), path)
    return found
