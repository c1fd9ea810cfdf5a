"""Where a sampling run leaves ComfyUI's process: in place of a guider's `outer_sample`.

Everything around it (noise, noise levels, masks, previews, outputs) stays ComfyUI's own code in the host; everything
inside it (conditioning, guidance, the sampler) is ComfyUI's own code in the workers.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import comfy.model_management
import comfy.options
import comfy.patcher_extension
import comfy.samplers
import comfyui_version
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ..parallel_runtime.errors import Refused, WorkerFailed
from ..parallel_runtime.families.base import Family
from ..parallel_runtime.host.cost import Work, activation_bytes, evaluation_seconds, work_of
from ..parallel_runtime.host.group import Result
from ..parallel_runtime.host.planning import check_step_cache, plan
from ..parallel_runtime.host.runtime import borrowed_group, measured_link
from ..parallel_runtime.specs import ComfySetup, ModelSpec, Parallelism, ParallelRequest, Placement
from .describe import Patches, describe_job, describe_model
from .refusals import check_guider, check_guider_options
from .requirements import check_requirements
from .residence import residence

log = logging.getLogger(__name__)

KEY = "context_parallel"

Callback = Callable[[int, Any, Any, int], None]


def model_on_workers(model: ModelPatcher, request: ParallelRequest) -> ModelPatcher:
    """A clone of `model` whose sampling runs in the worker group. Raises Refused for what workers cannot honour."""
    check_requirements()
    spec, family, patches = describe_model(model, request.dtype)
    sampling = RemoteSampling(spec, family, patches, request)
    plan_for(family, request)
    remote = model.clone()
    remote.wrappers = {}  # those of MODEL run in the workers
    remote.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.OUTER_SAMPLE, KEY, sampling)
    return remote


def guider_on_workers(guider: comfy.samplers.CFGGuider, request: ParallelRequest) -> comfy.samplers.CFGGuider:
    """A copy of `guider` whose sampling runs in the worker group. Raises Refused for what workers cannot honour."""
    if not isinstance(guider, comfy.samplers.CFGGuider):
        raise Refused(f"the GUIDER {type(guider).__name__} is none of ComfyUI's; sample with SamplerCustomAdvanced")
    check_guider(guider)
    remote = copy.copy(guider)
    remote.model_patcher = model_on_workers(guider.model_patcher, request)
    check_guider_options(guider)
    remote.model_options = remote.model_patcher.model_options
    return remote


@dataclass(frozen=True)
class RemoteSampling:
    """ComfyUI's OUTER_SAMPLE wrapper: sends the run to the workers instead of going on to the sampler."""

    spec: ModelSpec
    family: Family
    patches: Patches
    request: ParallelRequest

    def __call__(
        self,
        executor: Any,
        noise: Tensor,
        latent_image: Tensor,
        sampler: comfy.samplers.Sampler,
        sigmas: Tensor,
        denoise_mask: Tensor | None = None,
        callback: Callback | None = None,
        disable_pbar: bool = False,
        seed: int | None = None,
        latent_shapes: list | None = None,
    ) -> Tensor:
        """Samples [B, C, (T,) H, W], as `CFGGuider.outer_sample` returns them."""
        guider = executor.class_obj
        job = describe_job(
            guider, self.family, self.patches, noise, latent_image, sampler, sigmas, denoise_mask, seed, latent_shapes
        )
        job = replace(job, step_cache=self.request.step_cache)
        guided = is_guided(guider)
        _, placement = plan_for(self.family, self.request, guided=guided)
        check = comfy.model_management.throw_exception_if_processing_interrupted
        cached = self.request.step_cache > 0
        work = work_of(self.spec, self.family, tuple(noise.shape), _text_tokens(guider), cached=cached)
        watcher = Watcher(callback, guider.model_patcher.load_device)
        with borrowed_group(placement, comfy_setup(), check) as group:
            parallelism, _ = plan_for(self.family, self.request, guided=guided, work=work)
            residence.claim(group, self.spec, work.weight_bytes, activation_bytes(work, parallelism))
            if group.holds(self.spec):
                job = replace(job, patches=None)
            try:
                result = group.sample(self.spec, parallelism, job, on_step=watcher.on_step, watch=check)
            except WorkerFailed as failed:
                log.error("[CP] rank %d:\n%s", failed.rank, failed.traceback)
                raise
            finally:
                residence.settle(self.spec, self.request.after_sampling)
        watcher.finish(result.value["last"])
        self._log(result, placement)
        return result.value["samples"]

    def _log(self, result: Result, placement: Placement) -> None:
        tally = result.value["skipped"]
        log.info(
            "[CP] %s on %d worker(s): sampled in %.2f s, loaded in %.2f s%s",
            self.family.name,
            placement.world_size,
            result.seconds,
            result.load_seconds,
            ", step cache skipped {} of {} evaluations".format(*tally) if tally else "",
        )


class Watcher:
    """Passes the workers' steps on to ComfyUI's callback. Some are dropped where the host is behind; never the last."""

    def __init__(self, callback: Callback | None, device: torch.device) -> None:
        self._callback = callback
        self._device = device
        self._shown: int | None = None

    def on_step(self, step: int, x0: Tensor, x: Tensor, total: int) -> None:
        self._shown = step
        if self._callback is not None:
            self._callback(step, x0.to(self._device), x.to(self._device), total)

    def finish(self, last: tuple[int, Tensor, Tensor, int] | None) -> None:
        if last is not None and last[0] != self._shown:
            self.on_step(*last)


def plan_for(
    family: Family, request: ParallelRequest, *, guided: bool = False, work: Work | None = None
) -> tuple[Parallelism, Placement]:
    """Degrees and devices; by estimated speed once `work` and what the workers measured are known. Raises Refused."""
    gpus = visible_gpus()
    check_step_cache(request, family)
    parallelism, placement = plan(request, heads=family.heads, gpus=gpus, guided=guided)
    link = measured_link(placement)
    if work is None or link is None or not link.bytes_per_second:
        return parallelism, placement
    seconds = partial(evaluation_seconds, work, link=link)
    return plan(request, heads=family.heads, gpus=gpus, guided=guided, seconds=seconds)


def visible_gpus() -> int:
    """How many GPUs ComfyUI sees, if it uses any."""
    return torch.cuda.device_count() if comfy.model_management.get_torch_device().type == "cuda" else 0


def _text_tokens(guider: comfy.samplers.CFGGuider) -> int:
    texts = [cond["cross_attn"] for conds in guider.conds.values() for cond in conds if "cross_attn" in cond]
    return max((text.shape[1] for text in texts), default=0)


def is_guided(guider: comfy.samplers.CFGGuider) -> bool:
    """Whether several prompts are evaluated a step: ComfyUI leaves the negative one out at cfg 1."""
    if len(guider.conds) < 2:
        return False
    unneeded = not guider.model_options.get("disable_cfg1_optimization", False)
    return not (unneeded and len(guider.conds) == 2 and math.isclose(guider.cfg, 1.0))


def comfy_setup() -> ComfySetup:
    flags = tuple(sys.argv[1:]) if comfy.options.args_parsing else ()
    return ComfySetup(
        root=os.path.dirname(os.path.dirname(comfy.samplers.__file__)),
        flags=flags,
        folder=os.getcwd(),
        version=comfyui_version.__version__,
    )
