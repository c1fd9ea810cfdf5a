"""The modules of a network that its plan names, its blocks where it has no plan, and those that choose their own
attention. Knows no ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from .row_plan import RowPlan
from .split_plan import ModulePlan, Names, SplitPlan

CHOOSES = "ComfyAttention"  # the class of modules that may choose an attention function
LARGE_FRACTION = 0.02  # of the model's weights: smaller layers are on every device
Stack = nn.ModuleList | nn.ModuleDict


def blocks_of(network: nn.Module, plan: SplitPlan, *, carrying: bool = False) -> list[nn.Module]:
    """The modules of the plan's stacks, in the order in which they run; `carrying`: only those with hidden states.
    Those of a RowPlan are the modules of its `fetched_classes`."""
    if isinstance(plan, RowPlan):
        return _outermost(network, plan.fetched_classes)
    named = [each for each in plan.module_plans if each.name and "*" not in each.name and each.method == "forward"]
    stacks = [network.get_submodule(each.name) for each in named if each.split_args or not carrying]
    return [block for stack in stacks if isinstance(stack, Stack) for block in stack.children()]


def _outermost(module: nn.Module, classes: Names) -> list[nn.Module]:
    """The modules below `module` that are of one of these classes and inside of no other that is."""
    outermost = []
    for child in module.children():
        outermost += [child] if type(child).__name__ in classes else _outermost(child, classes)
    return outermost


def outermost_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yields what the network's lists of modules hold, without lists inside of these."""
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            yield from child
        else:
            yield from outermost_blocks(child)


def large_layers(network: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Returns layers outside of `blocks` with more than LARGE_FRACTION of the network's weights."""
    inside = {id(module) for block in blocks for module in block.modules()}
    minimum_bytes = LARGE_FRACTION * weight_bytes(network)
    layers = [module for module in network.modules() if not list(module.children()) and id(module) not in inside]
    return [layer for layer in layers if weight_bytes(layer) > minimum_bytes]


def weight_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def encoder_units(encoder: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Returns the parts of a text encoder that workers can share out: large layers outside of blocks, and blocks."""
    blocks = [block for block in outermost_blocks(encoder) if weight_bytes(block)]
    return large_layers(encoder, blocks), blocks


def modules_of(network: nn.Module, module_plan: ModulePlan) -> list[nn.Module]:
    """The modules that `module_plan` names. Raises ValueError where the network does not have them."""
    stack, _, below = module_plan.name.partition(".*.")
    try:
        module = network.get_submodule(stack)
        modules = list(module.children()) if isinstance(module, Stack) else [module]
        return [each.get_submodule(below) for each in modules]
    except AttributeError as missing:
        kind = type(network).__name__
        raise ValueError(f"the plan names {module_plan.name!r}, which {kind} does not have") from missing


def preferred_attentions(network: nn.Module) -> dict[nn.Module, Callable[..., Any]]:
    """The attention functions that a checkpoint chooses, by the module that calls them: in newer versions of ComfyUI it
    may choose one for each. ComfyUI does not tell an override which."""
    functions = {}
    for module in network.modules():
        for child in module.children():
            function: Any = getattr(child, "function", None) if type(child).__name__ == CHOOSES else None
            if function is not None:
                functions[module] = function
    return functions


def padding_modes(network: nn.Module) -> list[str]:
    """Names what convolutions pad with, other than zeros: a picture's other side, which rows or tokens do not have."""
    modes = {
        module.padding_mode
        for module in network.modules()
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and any(module._reversed_padding_repeated_twice)
    }
    return [f"padding_mode {mode}" for mode in sorted(modes - {"zeros"})]
