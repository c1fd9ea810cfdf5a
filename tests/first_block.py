"""What first-block caching goes by, measured from outside, in one process and in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from parallel_runtime.architectures.split_plan import SplitPlan


def change_between(transformer: nn.Module, plan: SplitPlan, *evaluations: Callable[[], object]) -> Tensor:
    """How much the first block's change of the watched tokens differs between two evaluations, [rows of the batch]."""
    site = plan.trunk[0]
    watched, name = next((n, carry[0]) for n, carry in enumerate(site.split_args) if plan.main_stream in carry[2])
    seen: list[Tensor] = []

    def watch(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        before = kwargs[str(name)] if name in kwargs else args[0]
        seen.append((out[watched] if isinstance(out, tuple) else out) - before)

    handle = transformer.get_submodule(f"{site.name}.0").register_forward_hook(watch, with_kwargs=True)
    for evaluate in evaluations:
        evaluate()
    handle.remove()
    first, second = (change.double().flatten(1) for change in seen)
    return (second - first).abs().sum(1) / first.abs().sum(1)
