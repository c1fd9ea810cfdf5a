"""A run as the host describes it and as its workers do it, two of them, one for each prompt: who evaluates what."""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace
from typing import Any

from ..architectures.cases import error, forward
from ..zoo.calls import CASES, UNDIVIDED
from ..zoo.networks import FLUX
from .pack import node_module, pack_module

import comfy.hooks  # isort: skip  # the pack's module has made ComfyUI importable
import comfy.samplers  # isort: skip
import comfy.supported_models  # isort: skip
import comfy.utils  # isort: skip
import torch  # isort: skip

describe, remote_model, coupling = (
    node_module(name) for name in ("describe.model", "remote.remote_model", "describe.model_patches")
)
sampling_job, model_patches = node_module("describe.sampling_job"), node_module("describe.model_patches")
sampling = pack_module("parallel_runtime.worker.comfy_loop.sampling")
comfy_model = pack_module("parallel_runtime.worker.comfy_loop.comfy_model")
weights = pack_module("parallel_runtime.worker.comfy_loop.patcher")
network_stats = pack_module("parallel_runtime.planning.network_stats")
bundles = pack_module("parallel_runtime.wire.bundles")
specs, jobs = pack_module("parallel_runtime.specs"), pack_module("parallel_runtime.jobs")

LATENT, ONE = (2, 16, 4, 6), specs.Parallelism()
PATCHES = {
    "nothing": {},
    "no patches": {"patches": {}},
    "an empty list": {"patches": {"attn1_patch": []}},
    "several empty lists": {"patches": {"attn1_patch": [], "double_block": [], "post_input": ()}},
    "a patch": {"patches": {"attn1_patch": [], "noise_refiner": [comfy.utils.repeat_to_batch_size]}},
}


def reached(rank: int, world: int, name: str, kept: bool) -> str:
    """Why a forward with a tensor in these transformer_options is not recorded; "" where it is."""
    try:
        value = [{"k": torch.zeros(1)}] if kept else torch.zeros(1)
        options = {"transformer_options": {name: value}}
        comfy_model.ComfyModel.recordable_arguments(SimpleNamespace(attention=None), options)
    except comfy_model.Unrecordable as why:
        return str(why)
    return ""


def stepwise(rank: int, world: int) -> dict[str, float]:
    """How far a worker's evaluations that ComfyUI's process asks for are from the network's own, by case of the zoo;
    those that differ in any bit."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}  # as torchrun does
    model, _ = _model(ONE)
    objects: dict[int, Any] = {}

    def evaluate(method: str, arguments: dict[str, Any]) -> Any:
        each, conds = remote_model.split_arguments(arguments, method)
        options, _ = model_patches.describe_transformer_options(arguments["transformer_options"])
        sent = remote_model.with_described_objects(conds, objects)
        received = bundles.read_bundle(bundles.write_bundle(sent))
        job = jobs.EvaluationJob(
            call_arguments=each, options=options, cond_number=1, cond_arguments=received, weight_patches={},
            batch_coupled=False, method=method,
        )  # fmt: skip
        return comfy_model.evaluate(model, job, _progress())["out"]

    differing = {}
    for name, case in (CASES | UNDIVIDED).items():
        network, inputs = case.network(), case.inputs()
        network._forward_pre_hooks.clear()  # the zoo's, which would be refused as a pack's
        want = forward(network, inputs)
        model.network = model.patcher.model.diffusion_model = network
        got = forward(remote_model.remote_network(network, evaluate), inputs)
        if not all(map(torch.equal, got, want)):
            differing[name] = error(got, want)
    return differing


def shared_out(rank: int, world: int, name: str) -> tuple[float, bool]:
    """How far a batch of this network, which has no plan, is from the network's own where its images are shared out
    over all ranks as the host says; and whether the host says that prompts are not."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}  # as torchrun does
    model, _ = _model(specs.Parallelism(data_degree=world))
    network, inputs = UNDIVIDED[name].network(), UNDIVIDED[name].inputs()
    prompts = {"cond_or_uncond": [0, 1], "sample_sigmas": torch.ones(2)} if name == "seedvr2" else {}
    want = forward(network, inputs, **prompts)
    images_coupled = describe.network_stats_of(network, None, 0, 4).images_coupled
    model.network = model.patcher.model.diffusion_model = network
    with torch.inference_mode():
        got = model.data_parallel(
            network, len(inputs["x"]), batch_coupled=images_coupled, **inputs, transformer_options=prompts
        )
    return error([got], want), coupling.network_couples_batch(network, prompts)


def kept_by(rank: int, world: int, node: str, widgets: dict[str, Any]) -> tuple[bool, str]:
    """Does what this node of comfy_extras leaves on a MODEL keep what an evaluation shows it; and why it is refused
    where the sampler is in ComfyUI's process, "" where it is not."""
    module, _, kind = node.partition(".")
    made = getattr(importlib.import_module(f"comfy_extras.{module}"), kind).execute(
        model=_model(ONE)[0].patcher, **widgets
    )
    model = made[0] if isinstance(made, tuple) else made.result[0]
    try:
        coupling.check_state(model, model.model_options)
    except pack_module("parallel_runtime.errors").Refused as why:
        return coupling.keeps_state(model, model.model_options), str(why)
    return coupling.keeps_state(model, model.model_options), ""


def why_not_sent(rank: int, world: int, what: str) -> str:
    """What a MODEL with a group of hooks is refused with, or does not go to the workers for: hooks that are in force
    without a condition (`forced`), or that have changed its model options (`options`)."""
    model = _model(ONE)[0].patcher.clone()
    hooks = comfy.hooks.HookGroup()
    hooks.add(comfy.hooks.TransformerOptionsHook({"patches": {}}))
    if what == "forced":
        model.forced_hooks = hooks
    guider = comfy.samplers.CFGGuider(model)
    guider.model_options = {**model.model_options, "registered_hooks": hooks}
    guider.conds = {"positive": [_cond(0)]}
    described = describe.DescribedModel(
        spec=None, weight_patches={}, network=model.model.diffusion_model, architecture=None,
        stats=network_stats.NetworkStats(), batch_coupled=False, runs_changed_code=False,
    )  # fmt: skip
    sampler, zeros = comfy.samplers.sampler_object("euler"), torch.zeros(LATENT)
    try:
        model_patches.check_network_patches(model)
        call = sampling_job.OuterSample(zeros, zeros, sampler, torch.linspace(1, 0, 3), seed=1)
        sampling_job.describe_job(guider, described, call)
    except pack_module("parallel_runtime.errors").Refused as why:
        return str(why)
    return ""


def _progress() -> Any:
    readings, state = pack_module("parallel_runtime.wire.messages"), pack_module("parallel_runtime.engine.comm.mesh")
    return sampling.Progress(Unheard(), 1, lambda: readings.Readings(0, 0), state.GroupState())


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
    described = describe.DescribedModel(
        spec=model.spec, weight_patches={}, network=model.network, architecture=None,
        stats=network_stats.NetworkStats(),
        batch_coupled=coupling.is_batch_coupled(host, host.model_options), runs_changed_code=False,
    )  # fmt: skip
    sampler, sigmas = comfy.samplers.sampler_object("euler"), torch.linspace(1, 0, 3)
    call = sampling_job.OuterSample(torch.randn(LATENT), torch.zeros(LATENT), sampler, sigmas, seed=1)
    job, _, _ = sampling_job.describe_job(guider, described, call)
    sampling.run(model, job, _progress())
    return {"planned": described.batch_coupled, "sent": job.batch_coupled, "rows": seen}


def rows_evaluated(rank: int, world: int, patches: str) -> dict[str, Any]:
    """Of a batch of four, how many rows this rank's network gets where two share them out, and how many come out."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world)}  # as torchrun does
    model, seen = _model(specs.Parallelism(data_degree=2))
    given: dict[str, Any] = {"x": torch.randn(4, *LATENT[1:]), "timestep": torch.ones(4)}
    options = dict(PATCHES[patches])
    job = jobs.EvaluationJob(
        call_arguments=given,
        options=model_patches.describe_transformer_options(options)[0],
        cond_number=1,
        cond_arguments={"context": torch.randn(4, 7, 96), "y": torch.randn(4, 64), "guidance": torch.ones(4)},
        weight_patches={},
        batch_coupled=coupling.network_couples_batch(model.network, options),
    )
    answer = comfy_model.evaluate(model, job, _progress())
    return {"given": seen, "out": len(answer["out"])}


def _model(degrees: Any) -> tuple[Any, list[int]]:
    """A tiny FLUX of this rank, and the rows of each of its evaluations."""
    config = comfy.supported_models.Flux(dict(FLUX))
    config.unet_config = FLUX | {"dtype": torch.float32}
    of = config.get_model({}, "", device="cpu")
    for parameter in of.parameters():
        parameter.data.normal_(std=0.02)
    patcher = weights.RankPatcher(of, torch.device("cpu"), torch.device("cpu"))
    patcher.file_views, patcher.weight_state = {}, weights.WeightState()
    of.memory_required = lambda *args, **kwargs: 0
    seen: list[int] = []
    network = of.diffusion_model
    network.register_forward_pre_hook(lambda module, args, kwargs: seen.append(_rows(args, kwargs)), with_kwargs=True)
    model = sampling.ComfyModel(specs.ModelSpec(loader="none"), network, patcher=patcher)
    model.mesh = pack_module("parallel_runtime.engine.comm.mesh").build_mesh(degrees, torch.device("cpu"))
    return model, seen


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return len(args[0] if args else kwargs["x"])


def _cond(seed: int) -> dict[str, Any]:
    dice = torch.Generator().manual_seed(seed)
    text = {"cross_attn": torch.randn(1, 7, 96, generator=dice), "pooled_output": torch.randn(1, 64, generator=dice)}
    return text | {"uuid": seed, "model_conds": {}}
