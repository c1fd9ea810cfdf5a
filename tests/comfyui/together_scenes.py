"""A run as the host describes it and as its workers do it, two of them, one for each prompt: who evaluates what."""

from __future__ import annotations

import os
from typing import Any

from ..networks import tiny
from .pack import node_module, pack_module

import comfy.samplers  # isort: skip  # the pack's module has made ComfyUI importable
import comfy.supported_models  # isort: skip
import comfy.utils  # isort: skip
import torch  # isort: skip

describe = node_module("describe")
sampling = pack_module("parallel_runtime.worker.comfy_loop.sampling")
evaluation = pack_module("parallel_runtime.worker.comfy_loop.evaluation")
weights = pack_module("parallel_runtime.worker.comfy_loop.weights")
specs, jobs = pack_module("parallel_runtime.specs"), pack_module("parallel_runtime.jobs")

LATENT = (2, 16, 4, 6)
PATCHES = {
    "nothing": {},
    "no patches": {"patches": {}},
    "an empty list": {"patches": {"attn1_patch": []}},
    "several empty lists": {"patches": {"attn1_patch": [], "double_block": [], "post_input": ()}},
    "a patch": {"patches": {"attn1_patch": [], "noise_refiner": [comfy.utils.repeat_to_batch_size]}},
}


def reached(rank: int, world: int, name: str, kept: bool) -> str:
    """Why a forward with a tensor in these transformer_options is not recorded; "" where it is."""
    reach = pack_module("parallel_runtime.worker.comfy_loop.model")
    try:
        reach.reaching({"transformer_options": {name: [{"k": torch.zeros(1)}] if kept else torch.zeros(1)}}, None)
    except reach.Unrecordable as why:
        return str(why)
    return ""


class Unheard:
    """A connection to a host that listens to nothing and says nothing."""

    def offer(self, *_: Any) -> bool:
        return True

    def waiting(self) -> bool:
        return False


def rows_sampled(rank: int, world: int, patches: str, of_guider: bool) -> dict[str, Any]:
    """What planning goes by, what the job says, and how many rows this rank's network gets in each evaluation.

    The patches lie on MODEL, or only on the guider."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}  # as torchrun does
    model, seen = _model(specs.Parallelism(cfg_degree=2))
    host = model.patcher.clone()
    guider = comfy.samplers.CFGGuider(host)
    guider.model_options = {**host.model_options, "transformer_options": {**PATCHES[patches]}}
    if not of_guider:
        host.model_options = guider.model_options
    guider.set_cfg(2.0)
    guider.conds = {name: [_cond(index)] for index, name in enumerate(("positive", "negative"))}
    source = describe.Source(
        spec=model.spec, weights={}, network=model.network, plan=None, figures=None, ringless=False,
        together=describe.keeps_together(host, host.model_options),
    )  # fmt: skip
    job = describe.describe_job(
        guider, source, torch.randn(LATENT), torch.zeros(LATENT), comfy.samplers.sampler_object("euler"),
        torch.linspace(1, 0, 3), None, 1, None,
    )  # fmt: skip
    sampling.run(model, job, sampling.Pulse(Unheard(), 1))
    return {"planned": source.together, "sent": job.together, "rows": seen}


def rows_evaluated(rank: int, world: int, patches: str) -> dict[str, Any]:
    """Of a batch of four, how many rows this rank's network gets where two share them out, and how many come out."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}  # as torchrun does
    model, seen = _model(specs.Parallelism(data_degree=2))
    given: dict[str, Any] = {"x": torch.randn(4, *LATENT[1:]), "timestep": torch.ones(4)}
    options = dict(PATCHES[patches])
    job = jobs.EvaluationJob(
        each=given,
        options=node_module("patches").describe_inside(options, None),
        prompt=1,
        conds={"context": torch.randn(4, 7, 96), "y": torch.randn(4, 64), "guidance": torch.ones(4)},
        patches={},
        together=describe.seen_together(model.network, options),
    )
    answer = evaluation.Evaluations()(model, job, sampling.Pulse(Unheard(), 1))
    return {"given": seen, "out": len(answer["out"])}


def _model(degrees: Any) -> tuple[Any, list[int]]:
    """A tiny FLUX of this rank, and the rows of each of its evaluations."""
    config = comfy.supported_models.Flux(dict(tiny.FLUX))
    config.unet_config = tiny.FLUX | {"dtype": torch.float32}
    of = config.get_model({}, "", device="cpu")
    for parameter in of.parameters():
        parameter.data.normal_(std=0.02)
    patcher = weights.Weights(of, torch.device("cpu"), torch.device("cpu"))
    patcher.own, patcher.merged = {}, weights.Merged()
    of.memory_required = lambda *args, **kwargs: 0
    seen: list[int] = []
    network = of.diffusion_model
    network.register_forward_pre_hook(lambda module, args, kwargs: seen.append(_rows(args, kwargs)), with_kwargs=True)
    model = sampling.ComfyModel(specs.ModelSpec(loader="none"), network, patcher=patcher)
    model.mesh = pack_module("parallel_runtime.worker.engine.mesh").build_mesh(degrees, torch.device("cpu"))
    return model, seen


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return len(args[0] if args else kwargs["x"])


def _cond(seed: int) -> dict[str, Any]:
    dice = torch.Generator().manual_seed(seed)
    text = {"cross_attn": torch.randn(1, 7, 96, generator=dice), "pooled_output": torch.randn(1, 64, generator=dice)}
    return text | {"uuid": seed, "model_conds": {}}
