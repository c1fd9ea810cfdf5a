"""What is to be computed by which degrees, on what: planned with nothing left to choose but a place for weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parallel_runtime.planning.memory_model import Capacity, MemoryModel
from parallel_runtime.planning.network_stats import Work
from parallel_runtime.planning.resolve import resolve
from parallel_runtime.planning.run_plan import DeviceProfile, Estimate, PlanInputs, RunPlan
from parallel_runtime.request import ParallelRequest, WeightsChoice
from parallel_runtime.specs import Parallelism, Placement, WeightPlacement


@dataclass(frozen=True, kw_only=True)
class Case:
    work: Work
    degrees: Parallelism
    capacity: Capacity
    profile: DeviceProfile | None = None

    @property
    def memory(self) -> MemoryModel:
        return MemoryModel(work=self.work, degrees=self.degrees, capacity=self.capacity)

    def inputs(self, choice: WeightsChoice = "auto", before: WeightPlacement | None = None) -> PlanInputs:
        degrees = self.degrees
        request = ParallelRequest(
            weights=choice,
            shares=",".join(map(str, degrees.shares)) or "auto",
            options=degrees.options,
            **degrees.by_name,
        )
        return PlanInputs(
            request=request,
            network=self.work.network,
            gpus=degrees.world_size,
            guided=True,
            work=self.work,
            profile=self.profile,
            capacity=self.capacity,
            before=before,
            live=Placement(devices=tuple(f"cuda:{rank}" for rank in range(degrees.world_size))),
        )


def decide(choice: WeightsChoice, case: Case, *, before: WeightPlacement | None = None) -> RunPlan:
    return resolve(case.inputs(choice, before))


def estimated(plan: RunPlan) -> Estimate:
    assert plan.estimate is not None
    return plan.estimate


def weight_bytes(plan: RunPlan) -> tuple[int, ...]:
    """Bytes of weights, by rank."""
    return estimated(plan).weight_bytes_by_rank


def needed(plan: RunPlan) -> tuple[int, ...]:
    return estimated(plan).needed_bytes_by_rank


def with_tokens(case: Case, tokens: int, **work: int) -> Case:
    return replace(case, work=replace(case.work, tokens=tokens, **work))
