"""Sends a sampling run to the workers, in place of a guider's `outer_sample`.

Code around it (noise, noise levels, masks, previews, outputs) runs in ComfyUI's process, code inside it (conditioning,
guidance, the sampler) in the workers. Where something inside is not ComfyUI's own code, the sampler stays in ComfyUI's
process and only the network is in the workers.
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
from comfy_api.torch_helpers.torch_compile import COMPILE_KEY
from torch import Tensor

from ...parallel_runtime.errors import Refused
from ...parallel_runtime.group.machine_check import checked_plan
from ...parallel_runtime.group.worker_group import Result
from ...parallel_runtime.jobs import TWO_MODEL_GUIDERS, SamplingJob
from ...parallel_runtime.loading.random_states import set_random_states
from ...parallel_runtime.request import ParallelRequest
from ...parallel_runtime.specs import Placement
from ..describe.comfy_objects import Unsendable, qualified_name, reference
from ..describe.control_nets import controls_of
from ..describe.input_checks import (
    FULL_RUN_OPTIONS,
    check_conds,
    check_guider,
    check_masks,
    check_sampler,
    check_token_patches,
    partner_of,
    unsendable_partner,
)
from ..describe.model_patches import WRAPPER_KEY
from ..describe.sampling_job import Source, describe_job, describe_model
from .lease import lease_with_plan
from .remote_model import without_weights

log = logging.getLogger(__name__)

PREVIEWS = {  # OUTER_SAMPLE wrappers of ComfyUI's that only show each step, with what workers do not have
    "comfy_extras.nodes_triposplat.TripoSplatSamplingPreview.execute.<locals>.outer_sample_wrapper"
}

Callback = Callable[[int, Any, Any, int], None]


def model_on_workers(model: ModelPatcher, request: ParallelRequest) -> ModelPatcher:
    """A clone of `model` whose sampling runs in the worker group. Raises Refused for what workers cannot honour."""
    return _on_workers(model, _describe_checked(model, request), request)


def _on_workers(model: ModelPatcher, source: Source, request: ParallelRequest) -> ModelPatcher:
    remote = model.clone()
    remote.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, COMPILE_KEY)
    wrappers = remote.wrappers.pop(WrappersMP.OUTER_SAMPLE, {})
    previews = {key: group for key, group in wrappers.items() if all(qualified_name(one) in PREVIEWS for one in group)}
    inner = {key: group for key, group in wrappers.items() if key not in previews}  # run in the workers
    ours = {WRAPPER_KEY: [RemoteSampling(source, request)]}
    remote.wrappers[WrappersMP.OUTER_SAMPLE] = {**previews, **ours, **inner}
    return remote


def guider_on_workers(guider: Any, request: ParallelRequest) -> Any:
    """A copy of `guider` whose sampling runs in the worker group. Raises Refused for what workers cannot honour."""
    names = [name for name, value in vars(guider).items() if isinstance(value, ModelPatcher)]
    models = {name: _as_guided(guider, name) for name in names}
    if not models:
        raise Refused("guider.empty", guider=type(guider).__name__)
    remote = copy.copy(guider)
    sources = {name: _describe_checked(model, request) for name, model in models.items()}
    try:
        check_guider(guider)
        source = _with_partner(guider, sources, request)
    except Unsendable as reason:
        for name, model in models.items():
            setattr(remote, name, _with_remote_network(model, request, reason))
        return remote
    remote.model_patcher = _on_workers(models["model_patcher"], source, request)
    remote.model_options = remote.model_patcher.model_options
    return remote


def _as_guided(guider: Any, name: str) -> ModelPatcher:
    """Returns a MODEL of the guider, with the model options that the guider runs it with: they may be its own."""
    model: ModelPatcher = getattr(guider, name)
    options = getattr(guider, "model_options", model.model_options)
    if name != "model_patcher" or options is model.model_options:
        return model
    made = model.clone()
    made.model_options = options
    return made


def _with_partner(guider: Any, sources: dict[str, Source], request: ParallelRequest) -> Source:
    """Returns the guider's MODEL with the one of its negative prompt, if it has one. Raises Unsendable where workers
    cannot have both at once: through stages of a pipeline, with a step cache, or where they are not split alike."""
    source, partner = sources["model_patcher"], partner_of(guider)
    if partner is None:
        return source
    if request.pipeline_degree > 1 or request.options.step_cache:
        raise unsendable_partner(guider)
    try:
        (other,) = (sources[name] for name, value in vars(guider).items() if value is partner)
        return source.with_partner(other)
    except ValueError:
        raise unsendable_partner(guider) from None


def _describe_checked(model: ModelPatcher, request: ParallelRequest) -> Source:
    source = describe_model(model, request)
    checked_plan(source.inputs(request))
    if (patches := request.options.token_patches) > 1:
        check_token_patches(model, model.model_options, patches, compiled=source.spec.compilation is not None)
    return source


def _with_remote_network(model: ModelPatcher, request: ParallelRequest, reason: Unsendable) -> ModelPatcher:
    for name, off in FULL_RUN_OPTIONS.items():
        if (value := request.values[name]) > off:
            raise Refused("loop.here", name=name, value=f"{value:g}", reason=reason.sentence, without=off)
    log.info(
        "[CP] the sampler runs in ComfyUI's process, and every model call goes to the workers and back, because %s",
        reason,
    )
    return without_weights(model, request)


@dataclass(frozen=True)
class RemoteSampling:
    """ComfyUI's OUTER_SAMPLE wrapper, which sends the run to the workers instead of calling the sampler."""

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
        """Returns samples [B, C, (T,) H, W], as `CFGGuider.outer_sample` does."""
        guider = executor.class_obj
        source = self.source.sampled_by(sampler).guided_by(guider.conds)
        check_conds(self.source.architecture, self.source.network, guider.conds)
        shape = tuple(latent_shapes[0]) if latent_shapes else tuple(noise.shape)
        if self.request.options.token_patches > 1:
            self._check_patches(guider, source, shape, len(sigmas) - 1)
        try:
            job = describe_job(guider, source, noise, latent_image, sampler, sigmas, denoise_mask, seed, latent_shapes)
        except Unsendable as reason:
            check_sampler(sampler)
            more = {} if latent_shapes is None else {"latent_shapes": latent_shapes}
            run = partial(
                executor, noise, latent_image, sampler, sigmas, denoise_mask, callback, disable_pbar, seed, **more
            )
            return self._sample_in_comfyui(guider, run, reason)
        return self._sample_in_workers(guider, source, job, shape, callback)

    def _check_patches(
        self, guider: comfy.samplers.CFGGuider, source: Source, shape: tuple[int, ...], steps: int
    ) -> None:
        request, compiled = self.request, source.spec.compilation is not None
        patches = request.options.token_patches
        check_token_patches(guider.model_patcher, guider.model_options, patches, compiled=compiled)
        check_masks(source.architecture, guider.conds, patches)
        source.check_patches(request, shape, _text_tokens(guider), steps)
        log.info(
            "[CP] approximate: not the picture of one GPU. After %d exact step(s) %d patches follow each other through "
            "the stages with keys and values that are one step old",
            request.options.warmup_steps,
            patches,
        )

    def _sample_in_comfyui(
        self, guider: comfy.samplers.CFGGuider, run: Callable[[], Tensor], reason: Unsendable
    ) -> Tensor:
        models = {name: value for name, value in vars(guider).items() if isinstance(value, ModelPatcher)}
        vars(guider).update({name: _with_remote_network(model, self.request, reason) for name, model in models.items()})
        try:
            return run()
        finally:
            vars(guider).update(models)

    def _sample_in_workers(
        self,
        guider: comfy.samplers.CFGGuider,
        source: Source,
        job: SamplingJob,
        shape: tuple[int, ...],
        callback: Callback | None,
    ) -> Tensor:
        guided = is_guided(guider)
        controls, patches = controls_of(guider.conds), self.request.options.token_patches
        if controls and patches > 1:
            raise Refused("patches.model", widget="patches", patches=patches, things="ControlNets")
        source = source.with_models_of(guider.conds)
        prompts = sum(map(len, list(guider.conds.values())[: None if guided else 1]))
        work = source.work(shape, _text_tokens(guider), prompts=prompts, cached=self.request.options.step_cache > 0)
        device = guider.model_patcher.load_device
        steps = StepCallback(callback, device)
        inputs = source.inputs(self.request, work, guided=guided, batch_coupled=job.batch_coupled)
        with lease_with_plan(source.spec, inputs, self.request.after_sampling) as (lease, plan):
            result = lease.run(plan, replace(job, entries_per_call=plan.entries_per_call), on_step=steps.on_step)
        set_random_states(result.value["random_states"], device)
        steps.finish(result.value["last"])
        self._log(source, result, plan.placement)
        return result.value["samples"]

    def _log(self, source: Source, result: Result, placement: Placement) -> None:
        tally = result.value["skipped"]
        log.info(
            "[CP] %s on %d worker(s): sampled in %.2f s, loaded in %.2f s%s",
            source.stats.name,
            placement.world_size,
            result.seconds,
            result.load_seconds,
            ", step cache skipped {} of {} evaluations".format(*tally) if tally else "",
        )


class StepCallback:
    """Passes the workers' steps on to ComfyUI's callback. Steps may be dropped where this process is slow, except the
    last one."""

    def __init__(self, callback: Callback | None, device: torch.device) -> None:
        self._callback = callback
        self._device = device
        self._last: tuple[int, Tensor] | None = None

    def on_step(self, step: int, x0: Tensor, x: Tensor, total: int) -> None:
        self._last = step, x0
        if self._callback is not None:
            self._callback(step, x0.to(self._device), x.to(self._device), total)

    def finish(self, last: tuple[int, Tensor, Tensor, int] | None) -> None:
        """Passes the last step on if it was dropped. The step number alone does not tell: samplers may repeat one."""
        previous = self._last
        if last is not None and not (previous and previous[0] == last[0] and torch.equal(previous[1], last[1])):
            self.on_step(*last)


def _text_tokens(guider: comfy.samplers.CFGGuider) -> int:
    texts = [cond["cross_attn"] for conds in guider.conds.values() for cond in conds if "cross_attn" in cond]
    return max((text.shape[1] for text in texts), default=0)


def is_guided(guider: comfy.samplers.CFGGuider) -> bool:
    """Does a step evaluate several prompts at once? ComfyUI leaves the negative one out at cfg 1, and evaluates two
    MODELs in turn."""
    if len(guider.conds) < 2 or reference(type(guider), "the GUIDER") in TWO_MODEL_GUIDERS:
        return False
    skips_negative = not guider.model_options.get("disable_cfg1_optimization", False)
    return not (skips_negative and len(guider.conds) == 2 and math.isclose(guider.cfg, 1.0))
