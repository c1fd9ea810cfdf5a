"""What workers are made of here: the GPUs that ComfyUI sees, and the ComfyUI that they shall import."""

from __future__ import annotations

import logging
import os
import sys
from functools import cache
from typing import Any

import comfy.model_management
import comfy.options
import comfy.samplers
import comfyui_version
import torch

from ..parallel_runtime.accelerators import ACCELERATORS, CUDA
from ..parallel_runtime.host.choosing import may_leave_out
from ..parallel_runtime.host.devices import why_one_gpu
from ..parallel_runtime.host.planning import Wish, plan
from ..parallel_runtime.host.runtime import runtime
from ..parallel_runtime.specs import ComfySetup, Division, ParallelRequest, Placement

log = logging.getLogger(__name__)


def plan_any(request: ParallelRequest, *, guided: bool = False) -> Division:
    """Degrees and devices where no model is known, or a VAE, which has no heads to share out. Raises Refused."""
    return plan(wish_here(request, guided=guided))


def usual_for(request: ParallelRequest, placement: Placement) -> Placement:
    """Of all these devices those that auto used last, where it has the choice."""
    free = may_leave_out(wish_here(request))
    return runtime.staffing.usual(placement) if free else placement


def wish_here(request: ParallelRequest, **found: Any) -> Wish:
    """`request`, on this host; what was `found` out about the model is in a Wish's own words."""
    return Wish(request=request, gpus=visible_gpus(), kind=gpu_kind(), **found)


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
