"""Where a sampling run leaves ComfyUI's process: in place of a guider's `outer_sample`.

Everything around it (noise, noise levels, masks, previews, outputs) stays ComfyUI's own code in the host; everything
inside it (conditioning, guidance, the sampler) is ComfyUI's own code in the workers. Where something inside is not
ComfyUI's own, the loop stays here and only the network is in the workers.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import comfy.samplers
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from ..parallel_runtime.errors import Refused
from ..parallel_runtime.host.group import Result
from ..parallel_runtime.host.planning import plan
from ..parallel_runtime.jobs import SamplingJob
from ..parallel_runtime.specs import ParallelRequest, Placement
from .code import Unsendable
from .compiling import leave_eager
from .describe import Source, describe_job, describe_model
from .evaluation import RemoteEvaluation
from .lease import leased, staffed
from .patches import KEY
from .refusals import WHOLE_RUNS, check_conds, check_for_patches, check_guider, check_masks, check_sampler
from .stand_in import weightless

log = logging.getLogger(__name__)

Callback = Callable[[int, Any, Any, int], None]


def model_on_workers(model: ModelPatcher, request: ParallelRequest) -> ModelPatcher:
    """A clone of `model` whose sampling runs in the worker group. Raises Refused for what workers cannot honour."""
    source = _checked(model, request)
    remote = model.clone()
    leave_eager(remote)
    others = remote.wrappers.pop(WrappersMP.OUTER_SAMPLE, {})
    remote.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, RemoteSampling(source, request))
    remote.wrappers[WrappersMP.OUTER_SAMPLE].update(others)  # around the sampler, and inside the workers
    return remote


def guider_on_workers(guider: Any, request: ParallelRequest) -> Any:
    """A copy of `guider` whose sampling runs in the worker group. Raises Refused for what workers cannot honour."""
    models = {name: value for name, value in vars(guider).items() if isinstance(value, ModelPatcher)}
    if not models:
        raise Refused(f"the GUIDER {type(guider).__name__} holds no MODEL; sample with SamplerCustomAdvanced")
    remote = copy.copy(guider)
    try:
        check_guider(guider)
    except Unsendable as reason:
        for name, model in models.items():
            _checked(model, request)
            setattr(remote, name, _evaluated(model, request, reason))
        return remote
    remote.model_patcher = model_on_workers(guider.model_patcher, request)
    if guider.model_options is guider.model_patcher.model_options:
        remote.model_options = remote.model_patcher.model_options
    return remote


def _checked(model: ModelPatcher, request: ParallelRequest) -> Source:
    source = describe_model(model, request)
    plan(source.wish(request))
    if request.patches > 1:
        check_for_patches(model, model.model_options, request.patches, compiled=source.spec.compilation is not None)
    return source


def _evaluated(model: ModelPatcher, request: ParallelRequest, reason: Unsendable) -> ModelPatcher:
    for name, without in WHOLE_RUNS.items():
        if (asked := getattr(request, name)) > without:
            raise Refused(f"{name} {asked:g} cannot be honoured: the loop stays in ComfyUI's process, because "
                          f"{reason}; set {name} to {without}")  # fmt: skip
    log.info("[CP] the sampler runs in ComfyUI's process, and the workers evaluate the model, because %s", reason)
    return weightless(model, RemoteEvaluation(request))


@dataclass(frozen=True)
class RemoteSampling:
    """ComfyUI's OUTER_SAMPLE wrapper: sends the run to the workers instead of going on to the sampler."""

    source: Source
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
        guider, source = executor.class_obj, self.source.sampled_by(sampler)
        check_conds(self.source.plan, self.source.network, guider.conds)
        shape = tuple(latent_shapes[0]) if latent_shapes else tuple(noise.shape)
        if self.request.patches > 1:
            self._check_patches(guider, source, shape, len(sigmas) - 1)
        try:
            job = describe_job(guider, source, noise, latent_image, sampler, sigmas, denoise_mask, seed, latent_shapes)
        except Unsendable as reason:
            check_sampler(sampler)
            more = {} if latent_shapes is None else {"latent_shapes": latent_shapes}
            run = partial(
                executor, noise, latent_image, sampler, sigmas, denoise_mask, callback, disable_pbar, seed, **more
            )
            return self._here(guider, run, reason)
        job = replace(job, step_cache=self.request.step_cache, warmup_steps=self.request.warmup_steps)
        return self._there(guider, source, job, shape, callback)

    def _check_patches(
        self, guider: comfy.samplers.CFGGuider, source: Source, shape: tuple[int, ...], steps: int
    ) -> None:
        request, compiled = self.request, source.spec.compilation is not None
        check_for_patches(guider.model_patcher, guider.model_options, request.patches, compiled=compiled)
        check_masks(source.plan, guider.conds, request.patches)
        source.check_patches(request, shape, _text_tokens(guider), steps)
        log.info(
            "[CP] approximate: not the picture of one GPU. After %d exact step(s) %d patches follow each other through "
            "the stages with keys and values that are one step old",
            request.warmup_steps,
            request.patches,
        )

    def _here(self, guider: comfy.samplers.CFGGuider, run: Callable[[], Tensor], reason: Unsendable) -> Tensor:
        model = guider.model_patcher
        guider.model_patcher = _evaluated(model, self.request, reason)
        try:
            return run()
        finally:
            guider.model_patcher = model

    def _there(
        self,
        guider: comfy.samplers.CFGGuider,
        source: Source,
        job: SamplingJob,
        shape: tuple[int, ...],
        callback: Callback | None,
    ) -> Tensor:
        guided = is_guided(guider)
        prompts = sum(map(len, list(guider.conds.values())[: None if guided else 1]))
        work = source.work(shape, _text_tokens(guider), prompts=prompts, cached=self.request.step_cache > 0)
        watcher = Watcher(callback, guider.model_patcher.load_device)
        wish = source.wish(self.request, guided=guided, together=job.together)
        wish = staffed(source.spec, wish, work)
        with leased(source.spec, plan(wish).placement, self.request.after_sampling) as lease:
            division = lease.divide(wish, work)
            result = lease.run(division, replace(job, rows=division.rows), on_step=watcher.on_step)
        watcher.finish(result.value["last"])
        self._log(source, result, division.placement)
        return result.value["samples"]

    def _log(self, source: Source, result: Result, placement: Placement) -> None:
        tally = result.value["skipped"]
        log.info(
            "[CP] %s on %d worker(s): sampled in %.2f s, loaded in %.2f s%s",
            source.figures.name,
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


def _text_tokens(guider: comfy.samplers.CFGGuider) -> int:
    texts = [cond["cross_attn"] for conds in guider.conds.values() for cond in conds if "cross_attn" in cond]
    return max((text.shape[1] for text in texts), default=0)


def is_guided(guider: comfy.samplers.CFGGuider) -> bool:
    """Whether several prompts are evaluated a step: ComfyUI leaves the negative one out at cfg 1."""
    if len(guider.conds) < 2:
        return False
    unneeded = not guider.model_options.get("disable_cfg1_optimization", False)
    return not (unneeded and len(guider.conds) == 2 and math.isclose(guider.cfg, 1.0))
