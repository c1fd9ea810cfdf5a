"""A SamplingJob becomes one call of a ComfyUI guider's `sample` on this rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import comfy.model_management
import comfy.samplers
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from comfy.nested_tensor import NestedTensor
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from ...jobs import SamplingJob
from ..advice import Watch
from ..lanes import row_by_row
from ..pulse import Pulse
from .branches import KEY, Branches, cached, in_patches
from .code import rebuild
from .comfyui import named
from .model import ComfyModel
from .weights import Weights

OnStep = Callable[[int, Tensor, Tensor, int], None]


def run(model: ComfyModel, job: SamplingJob, pulse: Pulse) -> dict[str, Any]:
    """Returns {"samples": what the guider returned, "last": the last step's (step, x0, x, total), or None,
    "skipped": what the step cache says of itself}."""
    last: tuple[int, Tensor, Tensor, int] | None = None

    def on_step(step: int, x0: Tensor, x: Tensor, total: int) -> None:
        nonlocal last
        last = (step, x0, x, total)
        pulse.step(step, total, x0, x)

    patcher = _patcher(model, job, pulse)
    branches = Branches(model, pulse, together=job.together, rows=job.rows)
    patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, branches)
    patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, _applied(model, pulse, together=job.together))
    model.load(patcher)
    pulse.beat()
    with cached(model, patcher, job.step_cache) as cache, in_patches(model, patcher, job.sigmas, job.warmup_steps):
        samples = _sample(job, patcher, on_step)
    return {"samples": samples, "last": last, "skipped": cache.tally(shared=not job.together) if cache else None}


def _sample(job: SamplingJob, patcher: ModelPatcher, on_step: OnStep) -> Tensor:
    torch.manual_seed(job.random_seed)
    torch.set_rng_state(job.random_state)
    noise, latent, mask = (_unpacked(tensor, job) for tensor in (job.noise, job.latent, job.mask))
    samples = _guider(job, patcher).sample(
        noise,
        latent,
        rebuild(job.sampler),
        job.sigmas.clone(),
        denoise_mask=mask,
        callback=lambda step, x0, x, total: on_step(step, _packed(x0), _packed(x), total),
        disable_pbar=True,
        seed=job.seed,
    )
    return _packed(samples)


def _unpacked(tensor: Tensor | None, job: SamplingJob) -> Any:
    """A latent of several streams (audio with video) comes packed into one, and `sample` takes it apart."""
    if tensor is None or job.latent_shapes is None:
        return None if tensor is None else tensor.clone()
    return NestedTensor(comfy.utils.unpack_latents(tensor.clone(), [list(shape) for shape in job.latent_shapes]))


def _packed(tensor: Any) -> Tensor:
    return comfy.utils.pack_latents(tensor.unbind())[0] if tensor.is_nested else tensor


def _patcher(model: ComfyModel, job: SamplingJob, pulse: Pulse) -> Weights:
    """The MODEL of the host: with its weight patches, and with the code that lies on it."""
    patcher = model.clone(job.patches, pulse.loading)
    patcher.add_object_patch("model_sampling", rebuild_sampling(job.model_sampling))
    for name, value in job.attributes.items():
        patcher.add_object_patch(name, value)
    with model.patch_models.of_job(model) as patch_model:
        patcher.model_options.update(rebuild(job.model_options, patch_model))
        for kind, key, functions in job.wrappers:
            for function in rebuild(functions, patch_model):
                patcher.add_wrapper_with_key(kind, key, function)
    if model.attention is not None:
        patcher.model_options["transformer_options"].setdefault("optimized_attention_override", model.attention)
    if model.stages is not None and job.together:
        patcher.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, model.stages.before_others_look)
    for kind, key, functions in job.callbacks:
        for function in rebuild(functions):
            patcher.add_callback_with_key(kind, key, function)
    return patcher


def _applied(model: ComfyModel, pulse: Pulse, *, together: bool) -> Callable[..., Any]:
    """Around each evaluation of the model: a sign of life, and the rows of the batch spread over the lanes."""
    watch = Watch()

    def apply(executor: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        pulse.evaluating()
        evaluate = partial(row_by_row, executor) if model.stages and not together else executor
        with watch(model, x):
            return model.spread(evaluate, x.shape[0], x, *args, together=together, **kwargs)

    return apply


def _guider(job: SamplingJob, patcher: ModelPatcher) -> comfy.samplers.CFGGuider:
    guider = named(job.guider)(patcher)
    for name, value in job.guider_attributes.items():
        setattr(guider, name, value)
    guider.inner_set_conds({name: [[None, cond] for cond in conds] for name, conds in rebuild(job.conds).items()})
    return guider


def rebuild_sampling(sampling: dict[str, Any]) -> torch.nn.Module:
    """The host's `model_sampling` again: same bases, parameters and buffers."""
    bases = tuple(named(name) for name in sampling["bases"])
    module: torch.nn.Module = torch.nn.Module.__new__(type("ModelSampling", bases, {}))
    torch.nn.Module.__init__(module)
    for name, value in sampling["attributes"].items():
        setattr(module, name, value)
    for name, buffer in sampling["buffers"].items():
        module.register_buffer(name, buffer.clone(), persistent=False)
    return module
