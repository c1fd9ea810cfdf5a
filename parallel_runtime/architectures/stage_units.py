"""A network's blocks in the order in which they run, divided into the stages of a pipeline. Knows no ranks and no file
format. ComfyUI's process and the workers use the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ..specs import Parallelism
from .network_modules import Stack
from .partition import Load, share_out
from .split_plan import ModulePlan, SplitPlan


@dataclass(frozen=True, eq=False)
class BlockRef:
    """A block of a network: the stack that a ModulePlan names, and the block's name in it."""

    module_plan: ModulePlan
    stack: Stack
    name: str

    @property
    def block(self) -> nn.Module:
        block = self.stack._modules[self.name]
        assert block is not None
        return block

    @property
    def path(self) -> str:
        """The block's module path in the network."""
        return f"{self.module_plan.name}.{self.name}"


Unit = list[BlockRef]  # blocks that belong to one stage: one, and those that run beside it


def units_of(network: nn.Module, plan: SplitPlan) -> list[Unit]:
    """The units that stages may share out, in the order in which they run; empty for a network that has none."""
    units: list[Unit] = []
    first = 0  # of the last stack's units
    for module_plan in plan.module_plans:
        if not (module_plan.split_args and module_plan.updated_args) or "*" in module_plan.name:
            continue
        stack = network.get_submodule(module_plan.name)
        if not isinstance(stack, Stack):
            continue
        refs = [BlockRef(module_plan, stack, name) for name in stack._modules]
        if module_plan.runs_with is None:
            first = len(units)
            units += [[ref] for ref in refs]
            continue
        for place, ref in zip(module_plan.runs_with(network), refs, strict=True):
            units[first + place].append(ref)
    return units


def why_not_in_patches(plan: SplitPlan) -> str:
    """Why a network's tokens cannot go through stages patch by patch; "" where they can."""
    carriers = [module_plan for module_plan in plan.module_plans if module_plan.split_args]
    for module_plan in carriers:
        functions = module_plan.token_functions or module_plan.head_functions
        if functions or (module_plan.gathers and module_plan is not carriers[-1]):
            return f"{module_plan.name} need the whole sequence"
        if module_plan.gathers == "each":
            return f"between its {module_plan.name} the whole sequence is needed"
        if module_plan.runs_with or module_plan.late_args:
            return f"{module_plan.name} keep more than tokens for later blocks"
        if module_plan.repeats:
            return f"{module_plan.name} run several times in an evaluation"
        if "attention_mask" in module_plan.args:
            return f"{module_plan.name} cut their attention mask as they cut tokens"
    if framed := [module_plan.name for module_plan in plan.module_plans if module_plan.frames]:
        return f"{framed[0]} needs whole frames"
    if plan.replicated:
        return f"its {', '.join(sorted(plan.replicated))} is whole in every block"
    if others := sorted(plan.streams - {plan.main_stream, "text"}):
        return f"its {', '.join(others)} is a sequence beside the {plan.main_stream}"
    return ""


def counts_of(network: nn.Module, plan: SplitPlan, parallelism: Parallelism) -> tuple[int, ...]:
    """How many units each stage has. Raises ValueError for more stages than units, which planning refuses."""
    units = units_of(network, plan)
    return parallelism.stages or share_out([Load(0, len(unit)) for unit in units], parallelism.pipeline_degree)


def owners(counts: Sequence[int]) -> list[int]:
    """The stage of each unit."""
    return [stage for stage, count in enumerate(counts) for _ in range(count)]
