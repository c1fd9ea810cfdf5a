"""CP Plan's button: a few steps of this very work on 1, 2, 4, ... devices of this machine, one after the other. What
they took is remembered where every run's pace is (host/history.py)."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from nodes import KSampler  # type: ignore[attr-defined]  # ComfyUI's module, not our package

from ..parallel_runtime.errors import Refused
from ..parallel_runtime.host.history import Cost
from ..parallel_runtime.host.pipelines import LEAST_STEPS
from ..parallel_runtime.host.runtime import runtime
from ..parallel_runtime.specs import Division, ParallelRequest
from .remote import model_on_workers

log = logging.getLogger(__name__)

STEPS = 4  # the first one is not like the others


def measure(
    model: Any, latent: dict[str, Any], positive: list, request: ParallelRequest, division: Division, cfg: float
) -> None:
    """Samples with `request` as it is, which comes to `division`, and on fewer devices with degrees on auto. Where one
    is refused, for lack of memory say, the others are measured all the same."""
    devices = division.placement.devices
    for count in counts(len(devices)):
        fewer = replace(
            ParallelRequest(dtype=request.dtype, weights=request.weights, cuda_graphs=request.cuda_graphs),
            devices=",".join(devices[:count]),
        )
        asked = replace(request, devices=",".join(devices)) if count == len(devices) else fewer
        try:
            _sample(model, latent, positive, replace(asked, nnodes=1, after_sampling="keep"), cfg)
        except Refused as refused:
            log.warning("[CP] not measured on %d: %s", count, refused)


def cost_of(division: Division, kind: Hashable) -> Cost:
    """Of measuring this kind of work on these devices."""
    devices = division.placement.devices
    workers = counts(len(devices))
    cpu = devices[0] == "cpu"
    return Cost(steps=STEPS, workers=workers, cpu=cpu, seconds=runtime.history.cost(kind, workers, STEPS))


def counts(devices: int) -> Sequence[int]:
    """Powers of two, and all of them last: the workers that the next run wants are there then."""
    doubled = [1 << power for power in range(devices.bit_length()) if 1 << power < devices]
    return [*doubled, devices]


def _sample(model: Any, latent: dict[str, Any], positive: list, request: ParallelRequest, cfg: float) -> None:
    KSampler().sample(
        model_on_workers(model, request),
        seed=0,
        steps=STEPS if request.patches == 1 else max(LEAST_STEPS, request.warmup_steps + STEPS),
        cfg=cfg,
        sampler_name="euler",
        scheduler="simple",
        positive=positive,
        negative=positive,
        latent_image=latent,
        denoise=1.0,
    )
