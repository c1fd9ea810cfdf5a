"""A report on a plan that a test made by hand: the inputs that it could have been resolved from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parallel_runtime.explain.plan_report import Report, Subject
from parallel_runtime.explain.plan_report import report as plan_report
from parallel_runtime.planning.memory_model import UNLIMITED, Capacity
from parallel_runtime.planning.run_plan import DeviceProfile, PlanInputs, RunPlan
from parallel_runtime.request import ParallelRequest


def report(
    subject: Subject,
    plan: RunPlan,
    *,
    guided: bool,
    automatic: bool,
    profile: DeviceProfile | None = None,
    capacity: Capacity = UNLIMITED,
    resorted: bool = False,
    warmup: int = 1,
    weights: Any = "auto",
    **more: Any,
) -> Report:
    """`automatic`: the request left the degrees to auto; `resorted`: and the stages."""
    degrees = {} if automatic else {name: plan.degrees.by_name[name] for name in ("ring_degree", "ulysses_degree")}
    stages = 0 if resorted else plan.degrees.pipeline_degree
    options = replace(plan.degrees.options, warmup_steps=warmup)
    request = ParallelRequest(options=options, pipeline_degree=stages, weights=weights, **degrees)
    inputs = PlanInputs(request=request, gpus=8, guided=guided, work=subject.work, profile=profile, capacity=capacity)
    return plan_report(subject, plan, inputs, **more)
