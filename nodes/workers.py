"""Which workers a run gets: degrees and devices for a network on this host, and the ComfyUI that they shall import."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial

import comfy.model_management
import comfy.options
import comfy.samplers
import comfyui_version
import torch

from ..parallel_runtime.accelerators import ACCELERATORS, CUDA
from ..parallel_runtime.errors import Refused
from ..parallel_runtime.host.cost import Work, evaluation_seconds, rotating
from ..parallel_runtime.host.planning import check_step_cache, plan
from ..parallel_runtime.host.runtime import measured_link
from ..parallel_runtime.host.storing import as_one_pays
from ..parallel_runtime.specs import ComfySetup, Parallelism, ParallelRequest, Placement, RotateMethod
from .describe import Source
from .residence import residence


def plan_for(
    source: Source,
    request: ParallelRequest,
    *,
    guided: bool = False,
    together: bool = False,
    work: Work | None = None,
) -> tuple[Parallelism, Placement]:
    """Degrees and devices; by estimated speed once `work` and what the workers measured are known. Raises Refused."""
    figures = source.figures
    check_step_cache(request, figures)
    choose = partial(
        plan,
        heads=figures.heads,
        gpus=visible_gpus(),
        kind=gpu_kind(),
        guided=guided,
        together=together,
        ringless=source.ringless,
        whole="" if figures.divisible else figures.name,
    )
    parallelism, placement = choose(request)
    link = measured_link(placement)
    if work is None or link is None or not link.bytes_per_second:
        return _rotated(parallelism, "alltoall"), placement
    choose = partial(choose, seconds=partial(evaluation_seconds, work, link=link))
    parallelism, placement = choose(request)
    if parallelism.cfg_degree == 2 and not request.cfg_degree and request.weights == "auto":
        branches = residence.case(source.spec, work, parallelism, placement, link)
        with suppress(Refused):  # one sequence has no use for all devices that are named
            as_one, _ = choose(replace(request, cfg_degree=1))
            if as_one_pays(branches, replace(branches, degrees=as_one)):
                parallelism = as_one
    return _rotated(parallelism, rotating(work, parallelism, link)), placement


def _rotated(parallelism: Parallelism, method: RotateMethod) -> Parallelism:
    """With what `auto` comes to."""
    return replace(parallelism, rotate_method=method) if parallelism.rotate_method == "auto" else parallelism


def visible_gpus() -> int:
    """How many GPUs ComfyUI sees, if it uses any."""
    return torch.accelerator.device_count() if comfy.model_management.get_torch_device().type in ACCELERATORS else 0


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
