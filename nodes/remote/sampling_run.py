"""Sends a sampling run to the workers, in place of a guider's `outer_sample`.

Code around it (noise, noise levels, masks, previews, outputs) runs in ComfyUI's process, code inside it (conditioning,
guidance, the sampler) in the workers. Where something inside is not ComfyUI's own code, the sampler stays in ComfyUI's
process and only the network is in the workers.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from comfy.samplers import CFGGuider
from comfy_api.torch_helpers.torch_compile import COMPILE_KEY
from torch import Tensor

from ...parallel_runtime.errors import Refused, Sentence, WorkerLost, say
from ...parallel_runtime.group.machines import checked_plan
from ...parallel_runtime.group.runtime import runtime
from ...parallel_runtime.jobs import TWO_MODEL_GUIDERS, SamplingJob
from ...parallel_runtime.loading import code_names, object_codec, pack_states, random_states, replaced_code
from ...parallel_runtime.loading.code_names import Unsendable, qualified_name
from ...parallel_runtime.planning.request_checks import LEAST_STEPS
from ...parallel_runtime.request import ParallelRequest
from ..describe import foreign_code, sampling_job
from ..describe.host import announce_refusals, comfy_setup
from ..describe.model import DescribedModel, describe_model, unwrap_sampler, uses_network
from ..describe.model_patches import WRAPPER_KEY
from ..describe.sampling_job import OuterSample, TakeBack
from . import comparing, remote_model
from .lease import lease_with_plan

# Refusals of what a pack's code does to a split network in the middle of a run.
SEES_ALL_TOKENS = {"network.meanwhile", "blocks.inside", "attention.all_heads", "ring.node"}
log = logging.getLogger(__name__)

PREVIEWS = (  # OUTER_SAMPLE wrappers that only show each step, with what workers do not have; KJNodes' are the others
    "comfy_extras.nodes_triposplat.TripoSplatSamplingPreview.execute.<locals>.outer_sample_wrapper",
    ".ltxv_nodes.OuterSampleCallbackWrapper",
    ".preview_override_node._PreviewOverrideWrapper",
)


def model_on_workers(model: ModelPatcher, request: ParallelRequest) -> ModelPatcher:
    """A clone of `model` whose sampling runs in the worker group, or `model` where only ComfyUI's own process gives the
    right latent, as a pack has replaced code that all networks run. Raises Refused for what workers cannot honour."""
    if _stay_native([model], request):
        return model
    return _on_workers(model, RemoteSampling(request, _describe_checked(model, request)))


def _stay_native(models: Iterable[ModelPatcher], request: ParallelRequest) -> bool:
    replaced_code.forget_put_back()
    reason = next(filter(None, (foreign_code.why_native(model, request) for model in models)), None)
    if reason is not None:
        _say_native(request, reason)
    return reason is not None


def _say_native(request: ParallelRequest, reason: Sentence) -> None:
    """Logs why ComfyUI samples by itself. Raises Refused for options that only workers have."""
    _check_stepwise(request, reason)
    log.warning("[CP] %s", say("run.native", reason=reason))


def _describe_checked(model: ModelPatcher, request: ParallelRequest) -> DescribedModel:
    described = describe_model(model, request)
    checked_plan(described.inputs(request))
    return described


def _on_workers(model: ModelPatcher, sampling: RemoteSampling) -> ModelPatcher:
    remote = model.clone()
    remote.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, COMPILE_KEY)
    remote.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, WRAPPER_KEY)  # CP Model's
    previews, inner = dict[Any, Any](), dict[Any, Any]()
    for key, group in remote.wrappers.pop(WrappersMP.OUTER_SAMPLE, {}).items():
        is_preview = all(qualified_name(one).endswith(PREVIEWS) for one in group)
        (previews if is_preview else inner)[key] = group  # the inner ones run in the workers
    remote.wrappers[WrappersMP.OUTER_SAMPLE] = {**previews, WRAPPER_KEY: [sampling], **inner}
    return remote


def guider_on_workers(guider: Any, request: ParallelRequest) -> Any:
    """A copy of `guider` whose sampling runs in the worker group. Raises Refused for what workers cannot honour."""
    models = _guided_models(guider)
    if not models:
        raise Refused("guider.empty", guider=type(guider).__name__)
    if _stay_native(models.values(), request):
        return guider
    remote = copy.copy(guider)
    described = {name: _describe_checked(model, request) for name, model in models.items()}
    sampling = RemoteSampling(request)
    try:
        sampling_job.check_guider(guider)
        with_partner = _with_partner(guider, described, request)
        if not code_names.is_of_a_pack(type(guider)):  # whose `sample` may change the network first
            sampling = RemoteSampling(request, with_partner)
    except Unsendable as reason:
        if comparing.compared_sampler() is None and not any(one.stays_native for one in described.values()):
            for name, model in models.items():
                setattr(remote, name, _with_remote_network(model, request, reason))
            return remote
        sampling = RemoteSampling(request, described["model_patcher"], reason)
    remote.model_patcher = _on_workers(models["model_patcher"], sampling)
    remote.model_options = remote.model_patcher.model_options
    return remote


def _models_of(guider: Any) -> dict[str, ModelPatcher]:
    """Returns the MODELs of the guider, by the names of its attributes."""
    return {name: value for name, value in vars(guider).items() if isinstance(value, ModelPatcher)}


def _guided_models(guider: Any) -> dict[str, ModelPatcher]:
    """Returns the MODELs of the guider, with the model options that the guider runs it with: they may be its own."""
    models = _models_of(guider)
    own = models.get("model_patcher")
    if own is not None and getattr(guider, "model_options", own.model_options) is not own.model_options:
        models["model_patcher"] = own.clone()
        models["model_patcher"].model_options = guider.model_options
    return models


def _with_partner(guider: Any, models: dict[str, DescribedModel], request: ParallelRequest) -> DescribedModel:
    """Returns the guider's MODEL with the one of its negative prompt, if it has one. Raises Unsendable where workers
    cannot have both at once: through stages of a pipeline, with a step cache, or where they are not split alike."""
    described, partner = models["model_patcher"], sampling_job.partner_of(guider)
    if partner is None:
        return described
    if request.pipeline_degree > 1 or request.options.step_cache:
        raise sampling_job.unsendable_partner(guider)
    try:
        (other,) = (models[name] for name, value in vars(guider).items() if value is partner)
        return described.with_partner(other)
    except ValueError:
        raise sampling_job.unsendable_partner(guider) from None


def _with_remote_network(model: ModelPatcher, request: ParallelRequest, reason: Unsendable) -> ModelPatcher:
    _check_stepwise(request, reason.sentence)
    words = "[CP] the sampler runs in ComfyUI's process, and every model call goes to the workers and back, because %s"
    log.info(words, reason)
    remote = remote_model.without_weights(model, request)
    remote.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, WRAPPER_KEY)  # of CP Model and CP Load Diffusion Model
    return remote


def _check_stepwise(request: ParallelRequest, reason: str) -> None:
    """Raises Refused for options that need the loop in the workers, where it stays in ComfyUI's process."""
    for name, off in sampling_job.FULL_RUN_OPTIONS.items():
        if (value := request.values[name]) > off:
            raise Refused("loop.here", name=name, value=f"{value:g}", reason=reason, without=off)


def model_described_late(model: ModelPatcher, request: ParallelRequest, *, check: bool = True) -> ModelPatcher:
    """A clone of `model` whose sampling, by any node, runs in the worker group, with what is on it by then. Raises
    Refused for what workers cannot have of it already, if that is to be checked."""
    if check:
        if _stay_native([model], request):
            return model
        _describe_checked(model, request)
    made = model.clone()
    made.remove_wrappers_with_key(WrappersMP.OUTER_SAMPLE, WRAPPER_KEY)
    made.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, WRAPPER_KEY, RemoteSampling(request))
    return made


@dataclass(frozen=True)
class RemoteSampling:
    """ComfyUI's OUTER_SAMPLE wrapper, which sends the run to the workers instead of calling the sampler."""

    request: ParallelRequest
    described: DescribedModel | None = None  # None: the guider's MODELs are described as sampling starts (CP Model)
    reason: Unsendable | None = None  # why the loop has to stay in ComfyUI's process, if that is known

    def __call__(self, executor: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Returns samples [B, C, (T,) H, W], as `CFGGuider.outer_sample` does, for the same arguments."""
        guider = executor.class_obj
        if self.described is None:
            with announce_refusals():
                models = _guided_models(guider)
                if _stay_native(models.values(), self.request):
                    return executor(*args, **kwargs)
                described = {name: _describe_checked(model, self.request) for name, model in models.items()}
                try:
                    now = RemoteSampling(self.request, _with_partner(guider, described, self.request))
                except Unsendable as reason:
                    now = RemoteSampling(self.request, described["model_patcher"], reason)
                return now(executor, *args, **kwargs)
        call = OuterSample(*args, **kwargs)

        def natively(call: OuterSample) -> Tensor:
            values = [getattr(call, field.name) for field in fields(call)]
            return executor(*values[: len(args)], **{name: getattr(call, name) for name in kwargs})

        on_workers = partial(self._sample, guider, self.described, natively=natively)
        if comparing.compared_sampler() is None or len(call.sigmas) < 2:
            return on_workers(call)
        options, computed = self.request.options, self.described.spec.compute_dtype
        steps = max(LEAST_STEPS, options.warmup_steps + 1) if options.token_patches > 1 else 1
        dtype = getattr(torch, computed) if computed else guider.model_patcher.model.get_dtype_inference()
        how: dict[str, Any] = {"steps": steps, "dtype": dtype, "approximate": options.approximate}
        return comparing.compared(guider, call, natively, on_workers, **how)

    def _sample(
        self, guider: CFGGuider, model: DescribedModel, call: OuterSample, natively: Callable[[OuterSample], Tensor]
    ) -> Tensor:
        described, request = model.sampled_by(call.sampler).guided_by(guider.conds), self.request
        sampling_job.check_conds(model, guider.conds)
        if (patches := request.options.token_patches) > 1:
            sampling_job.check_token_patches(guider, described, patches)
            text, steps = sampling_job.text_tokens(guider.conds), len(call.sigmas) - 1
            described.check_patches(request, call.first_shape, text, steps)
            log.info(
                "[CP] approximate: not the picture of one GPU. After %d exact step(s) %d patches follow each other "
                "through the stages with keys and values that are one step old", request.options.warmup_steps, patches,
            )  # fmt: skip
        try:
            if self.reason is not None:
                raise self.reason
            job, take_back, parts = sampling_job.describe_job(guider, described, call)
        except Unsendable as reason:
            if described.stays_native:
                _say_native(request, reason.sentence)
                return natively(call)
            if uses_network(call.sampler):
                raise Refused("sampler.reaches", sampler=qualified_name(unwrap_sampler(call.sampler))) from None
            models = _models_of(guider)
            remote = {name: _with_remote_network(value, request, reason) for name, value in models.items()}
            try:
                vars(guider).update(remote)
                return natively(call)
            finally:
                vars(guider).update(models)
        if parts.names_network and described.architecture is not None:
            described = described.undivided("a pack's code that refers to parts of it")
        described = described.with_vaes(parts.vaes, call.first_shape)
        try:
            return self._sample_whole(guider, described, job, call, take_back)
        except (Refused, WorkerLost) as error:
            _note(described, job, error)
        return self._sample(guider, model, call, natively)  # with what can be sent of packs, and without the rest

    def _sample_whole(
        self, guider: CFGGuider, described: DescribedModel, job: SamplingJob, call: OuterSample, take_back: TakeBack
    ) -> Tensor:
        """Samples in the workers; again with the network undivided, where code of packs turns out to need that."""
        try:
            return self._sample_in_workers(guider, described, job, call, take_back)
        except Refused as error:
            if not job.packs or error.code not in SEES_ALL_TOKENS:
                raise
            log.warning("[CP] sampled again with the network undivided, because %s", error)
            undivided = replace(described.undivided("a pack's code"), batch_coupled=True)
            try:
                return self._sample_in_workers(guider, undivided, replace(job, batch_coupled=True), call, take_back)
            except Refused:
                raise error from None  # the degrees that were asked for need a split network

    def _sample_in_workers(
        self, guider: CFGGuider, described: DescribedModel, job: SamplingJob, call: OuterSample, take_back: TakeBack
    ) -> Tensor:
        guided, patches = _is_guided(guider), self.request.options.token_patches
        if patches > 1 and object_codec.controls_of(guider.conds):
            raise Refused("patches.model", widget="patches", patches=patches, things="ControlNets")
        described = described.with_models_of(guider.conds)
        prompts = sum(map(len, list(guider.conds.values())[: None if guided else 1]))
        text, cached = sampling_job.text_tokens(guider.conds), self.request.options.step_cache > 0
        work = described.work(call.first_shape, text, prompts=prompts, cached=cached)
        device = guider.model_patcher.load_device
        steps = StepCallback(call.callback, device, [*job.packs, *code_names.packs_named(described.spec.loader)])
        inputs = described.inputs(self.request, work, guided=guided, batch_coupled=job.batch_coupled)
        with lease_with_plan(described.spec, inputs, self.request.after_sampling) as (lease, plan):
            if plan.degrees.options.sends_float8:
                dtype = plan.degrees.options.comm_dtype
                log.info("[CP] approximate: not the picture of one GPU. Keys, values and heads travel as %s", dtype)
            result = lease.run(plan, replace(job, entries_per_call=plan.entries_per_call), on_step=steps.on_step)
        random_states.set_random_states(result.value["random_states"], device)
        steps.finish(result.value["last"])
        if comparing.compared_sampler() is None:  # or else ComfyUI's own step would begin with what this one has left
            take_back(result.value)
        for reason in result.value["lost"]:
            log.warning("[CP] what a pack's code has left in the workers cannot come back: %s", reason)
        skipped = result.value["skipped"]
        log.info(
            "[CP] %s on %d worker(s): sampled in %.2f s, loaded in %.2f s%s", described.stats.name,
            plan.placement.world_size, result.seconds, result.load_seconds,
            ", step cache skipped {} of {} evaluations".format(*skipped) if skipped else "",
        )  # fmt: skip
        return result.value["samples"]


def _note(described: DescribedModel, job: SamplingJob, error: Refused | WorkerLost) -> None:
    """Remembers what workers cannot have of packs, or have otherwise. Raises any other error again."""
    if isinstance(error, Refused) and error.code == "pack.state":
        pack_states.note_unequal(job.states, error)
        return
    code_names.note_failed_import(code_names.packs_named(described.spec.loader), error)
    if isinstance(error, Refused) and error.code == "pack.replaces":
        runtime.restart(str(error), comfy_setup())  # workers that have not imported that pack
        replaced_code.note_refused(job.packs, job.replaced, error)
    if not code_names.note_failed_import(job.packs, error) or code_names.unusable.keys() & {*described.packs}:
        raise error  # workers have to merge weight patches


@dataclass
class StepCallback:
    """Passes the workers' steps on to ComfyUI's callback; a slow process may miss some, but not the last."""

    callback: Callable[[int, Any, Any, int], None] | None
    device: torch.device
    packs: Sequence[str] = ()
    _last: tuple[int, Tensor] | None = None

    def on_step(self, step: int, x0: Tensor, x: Tensor, total: int) -> None:
        self._last = step, x0
        code_names.proven.update(self.packs)
        if self.callback is not None:
            self.callback(step, x0.to(self.device), x.to(self.device), total)

    def finish(self, last: tuple[int, Tensor, Tensor, int] | None) -> None:
        """Passes the last step on if it was dropped. The step number alone does not tell: samplers may repeat one."""
        previous = self._last
        if last is not None and not (previous and previous[0] == last[0] and torch.equal(previous[1], last[1])):
            self.on_step(*last)


def _is_guided(guider: CFGGuider) -> bool:
    """Does a step evaluate several prompts at once? At cfg 1 it does not, nor with two MODELs, which take turns."""
    if len(guider.conds) < 2 or code_names.reference(type(guider), "the GUIDER") in TWO_MODEL_GUIDERS:
        return False
    if not isinstance(guider.cfg, int | float):  # of a pack: by step
        return True
    skips_negative = not guider.model_options.get("disable_cfg1_optimization", False)
    return not (skips_negative and len(guider.conds) == 2 and math.isclose(guider.cfg, 1.0))
