"""Which workers a run gets: degrees and devices for a network on this host, and the ComfyUI that they shall import."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial

import comfy.model_management
import comfy.options
import comfy.samplers
import comfyui_version
import torch
from comfy.model_management import throw_exception_if_processing_interrupted

from ..parallel_runtime.accelerators import ACCELERATORS, CUDA
from ..parallel_runtime.host.choosing import choose
from ..parallel_runtime.host.cost import Work
from ..parallel_runtime.host.devices import why_one_gpu
from ..parallel_runtime.host.group import WorkerGroup
from ..parallel_runtime.host.planning import plan
from ..parallel_runtime.host.runtime import borrowed_group, measured_link
from ..parallel_runtime.host.storing import Case
from ..parallel_runtime.specs import ComfySetup, Division, ParallelRequest
from .describe import Source
from .residence import residence

log = logging.getLogger(__name__)

ANY_HEADS = 5040  # divides well


def plan_any(request: ParallelRequest, *, guided: bool = False) -> Division:
    """Degrees and devices where no model is known, or a VAE, which has no heads to share out. Raises Refused."""
    return plan(request, heads=ANY_HEADS, gpus=visible_gpus(), kind=gpu_kind(), guided=guided)


def plan_for(
    source: Source,
    request: ParallelRequest,
    *,
    guided: bool = False,
    together: bool = False,
    work: Work | None = None,
) -> Division:
    """Degrees and devices; by estimated speed once `work` and what the workers measured are known. Raises Refused."""

    def case(division: Division) -> Case:
        assert work is not None
        return residence.case(source.spec, work, division, measured_link(division.placement))

    return choose(
        request,
        source.figures,
        gpus=visible_gpus(),
        kind=gpu_kind(),
        guided=guided,
        together=together,
        ringless=source.ringless,
        work=work,
        measured=measured_link,
        case=case,
    )


@contextmanager
def borrowed(
    source: Source,
    request: ParallelRequest,
    work: Work,
    *,
    guided: bool = False,
    together: bool = False,
    measure: bool = True,
) -> Iterator[tuple[WorkerGroup, Division]]:
    """The workers for this work, which nobody else uses or ends meanwhile, and how it is divided among them by what
    they have at this moment, or, without `measure`, had when they were asked last. Raises Refused, and
    WorkerStartError."""
    divide = partial(plan_for, source, request, guided=guided, together=together)
    with borrowed_group(divide().placement, comfy_setup(), throw_exception_if_processing_interrupted) as group:
        if measure:
            group.measure(throw_exception_if_processing_interrupted)
        division = divide(work=work)
        assert division.placement == group.placement
        yield group, division


def visible_gpus() -> int:
    """How many GPUs ComfyUI sees, if it uses any."""
    if comfy.model_management.get_torch_device().type not in ACCELERATORS:
        return 0
    gpus = torch.accelerator.device_count()
    if why := why_one_gpu(gpus):
        _say_once(why)
    return gpus


@cache
def _say_once(why: str) -> None:
    log.warning("[CP] there is one GPU: %s", why)


def gpu_kind() -> str:
    """torch's type of these."""
    kind = comfy.model_management.get_torch_device().type
    return kind if kind in ACCELERATORS else CUDA.kind


def comfy_setup() -> ComfySetup:
    flags = tuple(sys.argv[1:]) if comfy.options.args_parsing else ()
    return ComfySetup(
        root=os.path.dirname(os.path.dirname(comfy.samplers.__file__)),
        flags=flags,
        folder=os.getcwd(),
        version=comfyui_version.__version__,
    )
