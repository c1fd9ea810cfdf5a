"""The modules of a network that its plan names, its blocks where it has no plan, those that choose their own attention,
and its blocks in the order in which they run, divided into the stages of a pipeline that cost about the same. Knows no
ranks and no file format.
ComfyUI's process and the workers use the same arithmetic."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

from torch import nn

from ..specs import Parallelism
from .row_plan import RowPlan
from .split_plan import ModulePlan, SplitPlan

CHOOSES = "ComfyAttention"  # the class of modules that may choose an attention function
LARGE_FRACTION = 0.02  # of the model's weights: smaller layers are on every device
Stack = nn.ModuleList | nn.ModuleDict


def blocks_of(network: nn.Module, plan: SplitPlan, *, carrying: bool = False) -> list[nn.Module]:
    """The modules of the plan's stacks, in the order in which they run; `carrying`: only those with hidden states.
    Those of a RowPlan are the modules of its `fetched_classes`."""
    if isinstance(plan, RowPlan):
        return list(_outermost(network, lambda module: type(module).__name__ in plan.fetched_classes))
    named = [each for each in plan.module_plans if each.name and "*" not in each.name and each.method == "forward"]
    stacks = [network.get_submodule(each.name) for each in named if each.split_args or not carrying]
    return [block for stack in stacks if isinstance(stack, Stack) for block in stack.children()]


def _outermost(module: nn.Module, is_one: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    """Yields the modules below `module` that are one, and inside of no other that is."""
    for child in module.children():
        yield from [child] if is_one(child) else _outermost(child, is_one)


def outermost_blocks(network: nn.Module) -> list[nn.Module]:
    """What the network's lists of modules hold, without lists inside of these."""
    lists: Any = _outermost(network, lambda module: isinstance(module, nn.ModuleList | nn.Sequential))
    return [block for modules in lists for block in modules]


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


@dataclass(frozen=True)
class Load:
    """The cost of a unit to its stage: bytes of weights, and blocks that tokens pass, all of the same cost."""

    nbytes: int
    blocks: int = 1


def share_out(loads: Sequence[Load], stages: int, budget_bytes: Sequence[int] = ()) -> tuple[int, ...]:
    """How many units each stage has, contiguous and at least one, so that the busiest stage has the fewest blocks,
    and of such divisions the fewest bytes. No stage exceeds its entry of `budget_bytes` if that is possible.
    Raises ValueError for more stages than units."""
    if stages > len(loads):
        raise ValueError(f"{len(loads)} blocks make no {stages} stages")
    nbytes_before = tuple(accumulate((load.nbytes for load in loads), initial=0))
    work = tuple(accumulate((load.blocks for load in loads), initial=0))

    def cost(begin: int, end: int, stage: int) -> tuple[int, int, int]:
        nbytes = nbytes_before[end] - nbytes_before[begin]
        return (max(0, nbytes - budget_bytes[stage]) if budget_bytes else 0), work[end] - work[begin], nbytes

    @cache
    def best(end: int, parts: int) -> tuple[tuple[int, int, int], tuple[int, ...]]:
        """The worst of each cost for the first units in this many stages, and where these end."""
        if parts == 1:
            return cost(0, end, 0), (end,)
        divisions = []
        for begin in range(parts - 1, end):
            before, ends = best(begin, parts - 1)
            divisions.append((tuple(map(max, before, cost(begin, end, parts - 1))), (*ends, end)))
        return min(divisions)  # type: ignore[return-value]  # map forgets how many

    _, ends = best(len(loads), stages)
    return tuple(end - begin for begin, end in pairwise((0, *ends)))
