"""Runs a SamplingJob as one call of a ComfyUI guider's `sample` on this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import comfy.samplers
import comfy.utils
import torch
from comfy.controlnet import ControlBase
from comfy.model_patcher import ModelPatcher
from comfy.nested_tensor import NestedTensor
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from ...jobs import TWO_MODEL_GUIDERS, SamplingJob
from ...loading.random_states import random_states, set_random_states
from ..batch_groups import entry_by_entry
from ..kernel_advice import kernel_advice
from ..process.progress import Progress
from .branches import KEY, Branches, with_pipefusion, with_step_cache
from .comfy_model import ComfyModel
from .comfyui import named
from .control_division import divided, of_conds, own_entries
from .patcher import RankPatcher
from .rebuild import LoadAdditional, Rebuilder, rebuild

Conds = dict[str, list[dict[str, Any]]]
OnStep = Callable[[int, Tensor, Tensor, int], None]


def run(model: ComfyModel, job: SamplingJob, progress: Progress) -> dict[str, Any]:
    """Returns {"samples": the guider's result, "last": the last step's (step, x0, x, total), or None, "skipped": the
    step cache's [evaluations skipped, evaluations], or None, "random_states": as the run left them}."""
    last: tuple[int, Tensor, Tensor, int] | None = None

    def on_step(step: int, x0: Tensor, x: Tensor, total: int) -> None:
        nonlocal last
        last = (step, x0, x, total)
        progress.step(step, total, x0, x)

    with model.additional.of_job(model) as load_additional:
        patchers = [_patcher(*pair, progress, load_additional) for pair in model.with_partner(job)]
        conds = rebuild(job.conds, load_additional)
    patcher = patchers[0]
    controls = of_conds(conds)
    patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, Branches(model, job, progress))
    together = job.batch_coupled or job.images_coupled
    wrapper = _apply_model_wrapper(model, progress, batch_coupled=together)
    patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, wrapper)
    wrapper = _control_wrapper(controls, model, batch_coupled=together)
    patcher.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, KEY, wrapper)
    model.load(patchers, controls)
    model.clear_kv_cache()
    model.benchmarked.clear()  # one that failed is repeated
    progress.heartbeat()
    pipefusion, warmup_steps = model.stages and model.stages.pipefusion, model.parallelism.options.warmup_steps
    in_patches = with_pipefusion(pipefusion, patcher, job.sigmas, warmup_steps) if pipefusion else nullcontext()
    set_random_states(job.random_states, model.device)
    with with_step_cache(model, patcher) as cache, in_patches:
        samples = _sample(job, patchers, conds, on_step)
    skipped = cache.counts(shared=not job.batch_coupled) if cache else None
    return {"samples": samples, "last": last, "skipped": skipped, "random_states": random_states(model.device)}


def _patcher(model: ComfyModel, job: SamplingJob, progress: Progress, load_additional: LoadAdditional) -> RankPatcher:
    """Returns the host's MODEL, rebuilt: with its weight patches, model_options, wrappers and callbacks."""
    patcher = model.clone(job.weight_patches, progress.loading)
    patcher.add_object_patch("model_sampling", rebuild_sampling(job.model_sampling))
    for name, value in job.attributes.items():
        patcher.add_object_patch(name, value)
    if job.mask is not None:
        patcher.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, _mask_wrapper(job.mask, patcher.load_device))
    rebuilder = Rebuilder(load_additional)
    patcher.model_options.update(rebuilder.rebuild(job.model_options))
    for kind, key, functions in job.wrappers:
        for function in rebuilder.rebuild(functions):
            patcher.add_wrapper_with_key(kind, key, function)
    for kind, key, functions in job.callbacks:
        for function in rebuilder.rebuild(functions):
            patcher.add_callback_with_key(kind, key, function)
    if model.attention is not None:
        patcher.model_options["transformer_options"].setdefault("optimized_attention_override", model.attention)
    if model.stages is not None and job.batch_coupled:
        patcher.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, model.stages.shared_forward)
    return patcher


def rebuild_sampling(sampling: dict[str, Any]) -> torch.nn.Module:
    """Rebuilds the host's `model_sampling`: the same bases, parameters and buffers."""
    bases = tuple(named(name) for name in sampling["bases"])
    module: torch.nn.Module = torch.nn.Module.__new__(type("ModelSampling", bases, {}))
    torch.nn.Module.__init__(module)
    for name, value in sampling["attributes"].items():
        setattr(module, name, value.clone() if isinstance(value, torch.Tensor) else value)
    for name, buffer in sampling["buffers"].items():
        module.register_buffer(name, buffer.clone(), persistent=False)
    return module


def _mask_wrapper(mask: Tensor, device: torch.device) -> Callable[..., Tensor]:
    """Returns an OUTER_SAMPLE wrapper that sets the job's mask, which the host's ComfyUI has prepared: preparing it
    again would mix up the masks of several images."""

    def sample(
        executor: Any, noise: Tensor, latent: Tensor, sampler: Any, sigmas: Tensor, _: None, *args: Any, **kwargs: Any
    ) -> Tensor:
        prepared = mask.to(device, copy=True)
        return executor(noise, latent, sampler, sigmas, prepared, *args, **kwargs)

    return sample


def _apply_model_wrapper(model: ComfyModel, progress: Progress, *, batch_coupled: bool) -> Callable[..., Any]:
    """Returns an APPLY_MODEL wrapper that reports each evaluation and divides its entries over the batch groups."""

    def apply(executor: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        progress.before_evaluation()
        evaluate = partial(entry_by_entry, executor) if model.stages and not batch_coupled else executor
        with kernel_advice(model, x):
            return model.data_parallel(evaluate, x.shape[0], x, *args, batch_coupled=batch_coupled, **kwargs)

    return apply


def _control_wrapper(controls: list[ControlBase], model: ComfyModel, *, batch_coupled: bool) -> Callable[..., Any]:
    """Returns a SAMPLER_SAMPLE wrapper, which starts after ComfyUI has prepared the ControlNets."""

    def sample(executor: Any, *args: Any, **kwargs: Any) -> Any:
        with own_entries(() if batch_coupled else controls, model.mesh.data), divided(controls, model):
            return executor(*args, **kwargs)

    return sample


def _sample(job: SamplingJob, patchers: Sequence[ModelPatcher], conds: Conds, on_step: OnStep) -> Tensor:
    samples = _guider(job, patchers, conds).sample(
        _unpacked(job.noise, job),
        _unpacked(job.latent, job),
        rebuild(job.sampler),
        job.sigmas.clone(),
        callback=lambda step, x0, x, total: on_step(step, _packed(x0), _packed(x), total),
        disable_pbar=True,
        seed=job.seed,
    )
    return _packed(samples)


def _guider(job: SamplingJob, patchers: Sequence[ModelPatcher], conds: Conds) -> comfy.samplers.CFGGuider:
    """Returns the host's guider, of two MODELs also where these are one."""
    models = (patchers[0], patchers[-1]) if job.guider in TWO_MODEL_GUIDERS else (patchers[0],)
    guider = named(job.guider)(*models)
    for name, value in job.guider_attributes.items():
        setattr(guider, name, value)
    guider.inner_set_conds({name: [[None, cond] for cond in branch] for name, branch in conds.items()})
    return guider


def _unpacked(tensor: Tensor, job: SamplingJob) -> Any:
    """Returns the latent as `sample` expects it; one of several streams (audio with video) is sent packed into one."""
    if job.latent_shapes is None:
        return tensor.clone()
    return NestedTensor(comfy.utils.unpack_latents(tensor.clone(), [list(shape) for shape in job.latent_shapes]))


def _packed(tensor: Any) -> Tensor:
    return comfy.utils.pack_latents(tensor.unbind())[0] if tensor.is_nested else tensor
