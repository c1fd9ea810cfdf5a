"""Runs a SamplingJob as one call of a ComfyUI guider's `sample` on this rank.

ComfyUI's `calc_cond_batch` predicts all branches of guidance in one call. CFG parallelism: each batch group has ComfyUI
evaluate its own branches, whatever their prompt lengths and areas, and gathers the other groups' predictions. A step
cache needs them one by one; PipeFusion reads the noise level there.

`_change` finds what a pack's code puts onto a network meanwhile, in place of its methods or modules: a split one
would compute with a part of the tokens, and another one may have been recorded without it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import comfy.samplers
import comfy.utils
import torch
from comfy.controlnet import ControlBase
from comfy.model_patcher import ModelPatcher
from comfy.nested_tensor import NestedTensor
from comfy.patcher_extension import WrappersMP, get_all_wrappers
from torch import Tensor, nn

from ...engine.comm.collectives import refuse_on_all_ranks
from ...engine.comm.mesh import MeshDim
from ...engine.split.streams import PipeFusion
from ...engine.stages import Stages
from ...errors import Refused
from ...jobs import TWO_MODEL_GUIDERS, SamplingJob
from ...loading.code_names import named, packs_named
from ...loading.mapped import with_attributes
from ...loading.object_codec import Rebuilder, controls_of, described_plainly
from ...loading.pack_states import changed_states, changed_variables, check_states, set_variables
from ...loading.random_states import random_states, set_random_states
from ..batch_groups import SamplerNoise, all_gather, entry_by_entry, local_items
from ..progress import Progress
from ..step_cache import StepCache
from .additional_models import divided, own_entries
from .comfy_model import ComfyModel, import_packs
from .patcher import RankPatcher

KEY = "context_parallel"
SIGMA_TOLERANCE = 1e-3  # as a share of a step: samplers may compute the same noise level differently

BranchConds = list[list[dict[str, Any]] | None]  # the conditions of each branch; None: it is not evaluated
Code = tuple[dict[str, Any], dict[tuple[Any, str], Any]]  # of a network: see `_code_of`


def run(model: ComfyModel, job: SamplingJob, progress: Progress) -> dict[str, Any]:
    """Returns {"samples": the guider's result, "last": the last step's (step, x0, x, total), or None, "skipped": the
    step cache's [evaluations skipped, evaluations], or None, "random_states": as the run left them, "changes" and
    "globals": what it has left in objects and global variables of packs, "lost": why some of that cannot be sent}."""
    last: tuple[int, Tensor, Tensor, int] | None = None

    def on_step(step: int, x0: Any, x: Any, total: int) -> None:
        nonlocal last
        last = (step, _packed(x0), _packed(x), total)
        progress.step(step, total, last[1], last[2])

    import_packs(job.packs, job.pack_files)
    model.check_replaced(job.replaced)
    with refuse_on_all_ranks():
        states = check_states(job.states)
    models = [model]
    if model.partner is not None and model.spec.partner is not None and len(job.weight_patches) > 1:
        model.partner.spec = model.spec.partner
        models.append(model.partner)
    weights = zip(models, job.weight_patches, strict=True)
    patchers = [each.clone(weight_patches, progress.loading) for each, weight_patches in weights]
    patcher = patchers[0]
    with model.additional.of_job(model) as load_additional:
        rebuilder = Rebuilder(job.described.tensors, load_additional, patcher)
        made = rebuilder(job.described.tree)
    set_variables(made["globals"], in_place=True)
    set_variables(dict(made["objects"]), in_place=False)
    noise = SamplerNoise(model.device, job.generator_kind, model.mesh.context.group_state)
    wrappers = Wrappers(model, job, progress, patchers, controls_of(made["conds"]), noise)
    for each, made_patcher, on_model in zip(models, patchers, made["models"], strict=True):
        wrappers.put_on(made_patcher, each, on_model)
    guider = _guider(job, patchers, made)
    model.load(patchers, wrappers.controls)
    wrappers.put_around(patcher)
    model.clear_kv_cache()
    progress.heartbeat()
    pipefusion, warmup_steps = model.stages and model.stages.pipefusion, model.parallelism.options.warmup_steps
    in_patches = with_pipefusion(pipefusion, patcher, job.sigmas, warmup_steps) if pipefusion else nullcontext()
    # Behind all that is loaded and made for the run, which may draw numbers too.
    set_random_states(job.random_states, model.device)
    changed = wrappers.running_changed_code() if job.runs_changed_code else nullcontext()
    with changed, with_step_cache(model, patcher) as cache, in_patches, patcher.state_dict_of_file(), noise:
        if job.packs:
            wrappers.code = _code_of(model.network)  # with what a step cache has put onto the blocks
        # What a pack's guider does in a `sample` of its own has run in ComfyUI's process.
        samples = comfy.samplers.CFGGuider.sample(
            guider, _unpacked(job.noise, job), _unpacked(job.latent, job), made["sampler"], job.sigmas.clone(),
            disable_pbar=True, callback=on_step, seed=job.seed,
        )  # fmt: skip
    skipped = cache.counts(shared=not job.batch_coupled) if cache else None
    attributes = made["guider_attributes"]
    attributes.update({name: value for name, value in vars(guider).items() if name in attributes})
    changes, lost = rebuilder.changes()
    return {
        "samples": _packed(samples), "last": last, "skipped": skipped, "random_states": random_states(model.device),
        "changes": changes, "globals": described_plainly(changed_variables(made["globals"])),
        "lost": [*lost, *changed_states(states)],
    }  # fmt: skip


@dataclass(eq=False)
class Wrappers:
    """What one run puts around the steps of ComfyUI's loop: a method for each of ComfyUI's kinds of wrappers. `code` is
    that of the network as the run of packs' code begins."""

    model: ComfyModel
    job: SamplingJob
    progress: Progress
    patchers: Sequence[RankPatcher]
    controls: list[ControlBase]
    noise: SamplerNoise
    code: Code | None = None

    def put_on(self, patcher: RankPatcher, model: ComfyModel, on_model: list[Any]) -> None:
        """Puts on the clone of a model what nodes/describe/sampling_job.py has described `on_model`."""
        objects, options, wrappers, callbacks = on_model
        if self.job.mask is not None:
            patcher.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, self.outer_sample)
        for name, value in objects.items():
            patcher.add_object_patch(name, value)
        patcher.model_options.update(options)
        for groups, add in (wrappers, patcher.add_wrapper_with_key), (callbacks, patcher.add_callback_with_key):
            for kind, key, functions in groups:
                for function in functions:
                    add(kind, key, function)
        if model.attention is not None:
            patcher.model_options["transformer_options"].setdefault("optimized_attention_override", model.attention)
        if model.stages is not None and self.job.batch_coupled:
            patcher.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, model.stages.shared_forward)

    def put_around(self, patcher: RankPatcher) -> None:
        """Puts the wrappers around the loop's steps on the MODEL that it calls."""
        patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, self.calc_cond_batch)
        patcher.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, KEY, self.sampler_sample)
        patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, self.apply_model)
        inside = WrappersMP.DIFFUSION_MODEL
        of_packs = patcher.get_all_wrappers(inside) or get_all_wrappers(inside, patcher.model_options, True)
        if self.job.packs and of_packs:  # they may replace code for the time of the forward
            patcher.add_wrapper_with_key(inside, KEY, self.diffusion_model)

    def outer_sample(
        self, executor: Any, noise: Tensor, latent: Tensor, sampler: Any, sigmas: Tensor, _: None, *args: Any, **kw: Any
    ) -> Tensor:
        """Sets the job's mask, which the host's ComfyUI has prepared: to prepare it again would mix up the masks of
        several images."""
        assert self.job.mask is not None
        mask = self.job.mask.to(self.patchers[0].load_device, copy=True)
        return executor(noise, latent, sampler, sigmas, mask, *args, **kw)

    def sampler_sample(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Divides the ControlNets, which ComfyUI has prepared by then."""
        job, model = self.job, self.model
        controls = [] if job.batch_coupled or job.images_coupled else self.controls
        with own_entries(controls, model.mesh.data), divided(self.controls, model):
            return executor(*args, **kwargs)

    def apply_model(self, executor: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Reports each evaluation and divides its entries over the batch groups."""
        self.progress.before_evaluation()
        together = self.job.batch_coupled or self.job.images_coupled
        evaluate = partial(entry_by_entry, executor) if self.model.stages and not together else executor
        with self._watched():
            return self.model.data_parallel(evaluate, x.shape[0], x, *args, batch_coupled=together, **kwargs)

    def diffusion_model(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        with self._watched():
            return executor(*args, **kwargs)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Raises Refused for a split network that a pack has changed by now. Has another one run with the change."""
        network = self.model.network
        change = _change(network, self.code, _code_of(network)) if self.code is not None else ""
        if change and (self.model.parallelism.splits_tokens or self.model.stages is not None):
            raise Refused("network.meanwhile", what=change)
        with self.running_changed_code() if change else nullcontext():
            yield

    @contextmanager
    def running_changed_code(self) -> Iterator[None]:
        """Has the networks, in this context, record nothing, and call what ComfyUI's own would. May be nested."""
        with ExitStack() as stack:
            stack.enter_context(with_attributes(self.model, runs_changed_code=True))
            for patcher in self.patchers:
                stack.enter_context(patcher.casting_as_natively())
            yield

    def calc_cond_batch(
        self, executor: Any, model: Any, conds: BranchConds, x: Tensor, timestep: Tensor, options: dict[str, Any]
    ) -> list[Tensor]:
        """Returns a denoised prediction [B, C, (T,) H, W] for each branch, as `calc_cond_batch` does, of branches that
        are divided over batch groups; not those of a `batch_coupled` job."""
        self.progress.vote()
        # Batches are limited alike on all ranks; ComfyUI alone would go by each rank's free memory.
        stages = None if self.job.batch_coupled else self.model.stages
        most = x.shape[0] if stages else self.job.entries_per_call
        limit: dict[str, Any] = {}
        if most:
            limit["memory_required"] = lambda shape, *args, **kwargs: 0 if shape[0] <= most else math.inf
        with self.noise.paused(), with_attributes(model, **limit):
            return self._divided_branches(executor, stages, model, conds, x, timestep, options)

    def _divided_branches(
        self, executor: Any, stages: Stages | None, model: Any, conds: BranchConds, x: Tensor, *args: Any
    ) -> list[Tensor]:
        branches = [index for index, cond in enumerate(conds) if cond is not None]
        groups = MeshDim() if self.job.batch_coupled else self.model.mesh.cfg
        if groups.size == 1 or len(branches) < 2:
            return _predictions(executor, stages, branches, model, conds, x, *args)
        local = [branches[position] for position in local_items(groups, len(branches))]
        local_conds: BranchConds = [cond if index in local else None for index, cond in enumerate(conds)]
        with refuse_on_all_ranks(groups):  # else the others wait in all_gather forever
            out = _predictions(executor, stages, local, model, local_conds, x, *args)
        predictions = torch.stack([out[index] for index in local]) if local else x.new_empty((0, *x.shape))
        for index, prediction in zip(branches, all_gather(groups, predictions, len(branches)), strict=True):
            out[index] = prediction
        return out


def _predictions(executor: Any, stages: Stages | None, branches: list[int], *arguments: Any) -> list[Tensor]:
    """Returns the predictions of these branches; in a pipeline, those of its last stage."""
    if stages is None or not branches:
        return executor(*arguments)
    with stages.in_flight():
        out = executor(*arguments)
        (predictions,) = stages.share_outputs([torch.stack([out[index] for index in branches])])
    for index, prediction in zip(branches, predictions, strict=True):
        out[index] = prediction
    return out


def _guider(job: SamplingJob, patchers: Sequence[ModelPatcher], made: dict[str, Any]) -> comfy.samplers.CFGGuider:
    """Returns the host's guider, of two MODELs also where these are one."""
    models = (patchers[0], patchers[-1]) if job.guider in TWO_MODEL_GUIDERS else (patchers[0],)
    kind = named(job.guider)
    guider: comfy.samplers.CFGGuider = object.__new__(kind)  # a pack's may be made from other arguments
    initialize = comfy.samplers.CFGGuider.__init__ if packs_named(job.guider) else kind.__init__
    initialize(guider, *models)
    vars(guider).update(made["guider_attributes"])
    conds = {name: [[None, cond] for cond in branch] for name, branch in made["conds"].items()}
    comfy.samplers.CFGGuider.inner_set_conds(guider, conds)
    return guider


def _unpacked(tensor: Tensor, job: SamplingJob) -> Any:
    """Returns the latent as `sample` expects it; one of several streams (audio with video) is sent packed into one."""
    if job.latent_shapes is None:
        return tensor.clone()
    return NestedTensor(comfy.utils.unpack_latents(tensor.clone(), [list(shape) for shape in job.latent_shapes]))


def _packed(tensor: Any) -> Tensor:
    return comfy.utils.pack_latents(tensor.unbind())[0] if tensor.is_nested else tensor


@contextmanager
def with_step_cache(model: ComfyModel, patcher: RankPatcher) -> Iterator[StepCache | None]:
    """Runs `patcher`, which is loaded, with a step cache, one branch after another. Yields None at step_cache 0."""
    threshold = model.parallelism.options.step_cache
    if not threshold:
        yield None
        return
    assert model.architecture is not None
    if model.stages is not None:
        raise Refused("cache.stages")
    cache = StepCache(model.network, model.architecture.plan, model.mesh, threshold)
    if prefetcher := patcher.weight_state.prefetcher:
        prefetcher.is_skipped = cache.skips  # skipped blocks need not be fetched

    def evaluate(
        executor: Any, x: Tensor, t: Tensor, c_concat: Any, c_crossattn: Any, control: Any, options: Any, **conds: Any
    ) -> Tensor:
        window = options.get("context_window")
        indices = () if window is None else tuple(window.index_list)
        # One uuid may be in several branches: ComfyUI gives them copies of a condition that has an area.
        with cache.branch((*options["cond_or_uncond"], *options["uuids"], x.shape, indices)):
            return executor(x, t, c_concat, c_crossattn, control, options, **conds)

    def predict(executor: Any, *arguments: Any) -> Tensor:
        cache.begin_prediction()
        return executor(*arguments)

    def separately(executor: Any, model: Any, conds: list[Any], x: Tensor, *args: Any) -> list[Tensor]:
        # The cache decides for each branch then, as in several batch groups.
        out = [torch.zeros_like(x)] * len(conds)
        for index, cond in enumerate(conds):
            if cond is not None:
                only_this = [cond if position == index else None for position in range(len(conds))]
                out[index] = executor(model, only_this, x, *args)[index]
        return out

    patcher.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, KEY, predict)
    patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, separately)
    patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, evaluate)
    with with_attributes(model, cache=cache), cache.caching():
        yield cache


@contextmanager
def with_pipefusion(pipefusion: PipeFusion, patcher: ModelPatcher, sigmas: Tensor, warmup_steps: int) -> Iterator[None]:
    """Runs `patcher` with PipeFusion, on keys and values of this run; exact at the levels of `warmup_steps`."""
    before, after = sigmas[warmup_steps - 1 : warmup_steps + 1].tolist()
    last_exact = after + SIGMA_TOLERANCE * (before - after)

    def set_exact(executor: Any, inner: Any, conds: list[Any], x: Tensor, sigma: Tensor, *args: Any) -> list[Tensor]:
        pipefusion.exact = pipefusion.exact and bool((sigma.max() - last_exact) * (before - after) > 0)
        return executor(inner, conds, x, sigma, *args)

    patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, set_exact)
    pipefusion.reset()
    pipefusion.exact = True
    try:
        yield
    finally:
        pipefusion.reset()


def _change(network: nn.Module, before: Code, now: Code) -> str:
    """Returns, on every rank alike, a module that is another one by now, or a method; "" where there is none."""
    for name, module in now[0].items():
        if module != before[0].get(name):
            return name or type(network).__name__
    for place, method in now[1].items():
        if method is not before[1].get(place):
            owner, name = place
            return f"{owner.__name__}.{name}"
    return ""


def _code_of(network: nn.Module) -> Code:
    """Returns for each module its class, and which methods of its own and children it has; and by owner and name the
    methods of the modules' classes, torch's among them, and what torch's layers call: a split network runs other code
    than these in places."""
    modules: dict[str, Any] = {}
    owners: set[Any] = {nn.functional}
    for path, module in network.named_modules():
        kind = type(module)
        owners.update(kind.__mro__)
        # ComfyUI leaves the class's methods on modules that it has unpatched, so names alone do not tell.
        own = [(name, id(value)) for name, value in vars(module).items() if callable(value) and hasattr(kind, name)]
        modules[path] = (kind, own, [*map(id, module._modules.values())])
    code = {(owner, name): code for owner in owners for name, code in vars(owner).items() if callable(code)}
    return modules, code
