"""A SamplingJob becomes one call of a ComfyUI guider's `sample` on this rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comfy.model_patcher
import comfy.sampler_helpers
import comfy.samplers
import torch
from comfy.patcher_extension import WrappersMP
from torch import Tensor

from ...errors import Refused
from ...specs import SamplingJob
from ..models import Model
from ..pulse import Pulse
from .branches import Branches
from .caching import cached
from .code import rebuild
from .comfyui import named
from .merging import merge
from .weightless import Evaluate, weightless

OnStep = Callable[[int, Tensor, Tensor, int], None]


def run(model: Model, job: SamplingJob, pulse: Pulse) -> dict[str, Any]:
    """Returns {"samples": what the guider returned, "last": the last step's (step, x0, x, total), or None,
    "skipped": what the step cache says of itself}."""

    def evaluate(x: Tensor, timestep: Tensor, conds: dict[str, Any]) -> Tensor:
        pulse.beat()
        if refused := sorted(k for k, v in conds.items() if v is not None and k not in model.family.conditions):
            raise Refused(f"{model.family.name} has no use for {', '.join(refused)} in a worker")
        return model(x, timestep, conds)

    last: tuple[int, Tensor, Tensor, int] | None = None

    def on_step(step: int, x0: Tensor, x: Tensor, total: int) -> None:
        nonlocal last
        last = (step, x0, x, total)
        pulse.step(step, total, x0, x)

    merge(model, job.patches, pulse.loading)
    patcher = _patcher(model, job, evaluate)
    # A wrapper around the network (EasyCache) may watch one prompt to decide on all, so it is shown all of them.
    together = bool(patcher.get_all_wrappers(WrappersMP.DIFFUSION_MODEL))
    branches = Branches(model.branches, pulse, together=together)
    patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, "context_parallel", branches)
    cache = model.step_cache(job.step_cache)
    with cached(cache, patcher):
        samples = _sample(job, patcher, on_step)
    return {"samples": samples, "last": last, "skipped": cache.tally(shared=not together) if cache else None}


def _sample(job: SamplingJob, patcher: comfy.model_patcher.ModelPatcher, on_step: OnStep) -> Tensor:
    torch.manual_seed(job.random_seed)
    torch.set_rng_state(job.random_state)
    return _guider(job, patcher).sample(
        job.noise.clone(),
        job.latent.clone(),
        rebuild(job.sampler),
        job.sigmas.clone(),
        denoise_mask=job.mask,
        callback=on_step,
        disable_pbar=True,
        seed=job.seed,
    )


def _patcher(model: Model, job: SamplingJob, evaluate: Evaluate) -> comfy.model_patcher.ModelPatcher:
    """The MODEL of the host without its weights, and with the code that lies on it."""
    assert model.spec.comfy is not None
    patcher = weightless(model.spec.comfy, getattr(torch, model.spec.compute_dtype), job.model_sampling, evaluate)
    patcher.model_options.update({key: rebuild(value) for key, value in job.model_options.items()})
    for kind, key, functions in job.wrappers:
        for function in rebuild(functions):
            patcher.add_wrapper_with_key(kind, key, function)
    return patcher


def _guider(job: SamplingJob, patcher: comfy.model_patcher.ModelPatcher) -> comfy.samplers.CFGGuider:
    guider = named(job.guider)(patcher)
    for name, value in job.guider_attributes.items():
        setattr(guider, name, value)
    guider.inner_set_conds({name: [[None, cond] for cond in rebuild(conds)] for name, conds in job.conds.items()})
    return guider
