"""CP Plan's button Measure: samples a few steps of this work on 1, 2, 4, ... devices of this machine in turn.
group/history.py keeps the measured seconds, as it does for every run."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from nodes import KSampler  # type: ignore[attr-defined]  # ComfyUI's module, not our package

from ...parallel_runtime.errors import Refused
from ...parallel_runtime.group.history import Cost
from ...parallel_runtime.group.runtime import runtime
from ...parallel_runtime.planning.request_checks import LEAST_STEPS
from ...parallel_runtime.planning.run_plan import RunPlan
from ...parallel_runtime.request import ParallelRequest
from .sampling_run import model_on_workers

log = logging.getLogger(__name__)

STEPS = 4  # more than one, because the first takes longer


def measure(
    model: Any, latent: dict[str, Any], positive: list, request: ParallelRequest, plan: RunPlan, cfg: float
) -> None:
    """Samples with `request`, whose plan is `plan`, and on fewer devices with default degrees. Skips a number of
    devices that is refused, for example for lack of memory."""
    devices = plan.placement.devices
    runtime.history.measuring = True
    try:
        for count in device_counts(len(devices)):
            measured = request if count == len(devices) else request.with_default_degrees
            measured = replace(measured, devices=",".join(devices[:count]), nnodes=1, after_sampling="keep")
            try:
                _sample(model, latent, positive, measured, cfg)
            except Refused as refused:
                log.warning("[CP] CP Plan cannot measure %d device(s): %s", count, refused)
    finally:
        runtime.history.measuring = False


def cost_of(plan: RunPlan, kind: Hashable) -> Cost:
    devices = plan.placement.devices
    workers = device_counts(len(devices))
    cpu = devices[0] == "cpu"
    return Cost(steps=STEPS, workers=workers, cpu=cpu, seconds=runtime.history.cost(kind, workers, STEPS))


def device_counts(devices: int) -> Sequence[int]:
    """Returns powers of two, and all devices last, so that the next run finds its workers."""
    doubled = [1 << power for power in range(devices.bit_length()) if 1 << power < devices]
    return [*doubled, devices]


def _sample(model: Any, latent: dict[str, Any], positive: list, request: ParallelRequest, cfg: float) -> None:
    KSampler().sample(
        model_on_workers(model, request),
        seed=0,
        steps=STEPS if request.options.token_patches == 1 else max(LEAST_STEPS, request.options.warmup_steps + STEPS),
        cfg=cfg,
        sampler_name="euler",
        scheduler="simple",
        positive=positive,
        negative=positive,
        latent_image=latent,
        denoise=1.0,
    )
