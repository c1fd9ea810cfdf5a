"""Runs a SamplingJob as one call of a ComfyUI guider's `sample` on this rank.

ComfyUI's `calc_cond_batch` predicts all branches of guidance in one call. CFG parallelism: each batch group has ComfyUI
evaluate its own branches, whatever their prompt lengths and areas, and gathers the other groups' predictions. A step
cache needs them one by one; PipeFusion reads the noise level there.

`Unchanged` finds what a pack's code puts onto a network meanwhile, in place of its methods or modules: a split one
would compute with a part of the tokens, and another one may have been recorded without it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
from ...errors import Refused
from ...jobs import TWO_MODEL_GUIDERS, SamplingJob
from ...loading.code_names import named, packs_named
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
OnStep = Callable[[int, Tensor, Tensor, int], None]


def run(model: ComfyModel, job: SamplingJob, progress: Progress) -> dict[str, Any]:
    """Returns {"samples": the guider's result, "last": the last step's (step, x0, x, total), or None, "skipped": the
    step cache's [evaluations skipped, evaluations], or None, "random_states": as the run left them, "changes" and
    "globals": what it has left in objects and global variables of packs, "lost": why some of that cannot be sent}."""
    last: tuple[int, Tensor, Tensor, int] | None = None

    def on_step(step: int, x0: Tensor, x: Tensor, total: int) -> None:
        nonlocal last
        last = (step, x0, x, total)
        progress.step(step, total, x0, x)

    import_packs(job.packs, job.pack_files)
    model.check_replaced(job.replaced)
    with refuse_on_all_ranks():
        states = check_states(job.states)
    pairs = model.with_partner(job.weight_patches)
    patchers = [of_model.clone(weight_patches, progress.loading) for of_model, weight_patches in pairs]
    patcher = patchers[0]
    with model.additional.of_job(model) as load_additional:
        rebuilder = Rebuilder(job.described.tensors, load_additional, patcher)
        made = rebuilder(job.described.tree)
    set_variables(made["globals"], in_place=True)
    set_variables(dict(made["objects"]), in_place=False)
    for (of_model, _), made_patcher, on_model in zip(pairs, patchers, made["models"], strict=True):
        _put_on(made_patcher, of_model, on_model, job)
    conds, guider = made["conds"], _guider(job, patchers, made)
    controls = controls_of(conds)
    noise = SamplerNoise(model.device, job.generator_kind, model.mesh.context.group_state)
    patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, Branches(model, job, progress, noise))
    together = job.batch_coupled or job.images_coupled
    wrapper = _control_wrapper(controls, model, batch_coupled=together)
    patcher.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, KEY, wrapper)
    model.load(patchers, controls)
    unchanged = Unchanged(model.network) if job.packs else None
    watched = partial(_watched, model, patchers, unchanged) if unchanged else nullcontext
    wrapper = _apply_model_wrapper(model, progress, watched, batch_coupled=together)
    patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, wrapper)
    inside = WrappersMP.DIFFUSION_MODEL
    if unchanged and (patcher.get_all_wrappers(inside) or get_all_wrappers(inside, patcher.model_options, True)):
        patcher.add_wrapper_with_key(inside, KEY, partial(_watched_forward, watched))
    model.clear_kv_cache()
    progress.heartbeat()
    pipefusion, warmup_steps = model.stages and model.stages.pipefusion, model.parallelism.options.warmup_steps
    in_patches = with_pipefusion(pipefusion, patcher, job.sigmas, warmup_steps) if pipefusion else nullcontext()
    # Behind all that is loaded and made for the run, which may draw numbers too.
    set_random_states(job.random_states, model.device)
    changed = _running_changed_code(model, patchers) if job.runs_changed_code else nullcontext()
    with changed, with_step_cache(model, patcher) as cache, in_patches, patcher.state_dict_of_file(), noise:
        if unchanged is not None:
            unchanged.begin()  # with what a step cache has put onto the blocks
        samples = _sample(job, guider, made["sampler"], on_step)
    skipped = cache.counts(shared=not job.batch_coupled) if cache else None
    attributes = made["guider_attributes"]
    attributes.update({name: value for name, value in vars(guider).items() if name in attributes})
    changes, lost = rebuilder.changes()
    return {
        "samples": samples, "last": last, "skipped": skipped, "random_states": random_states(model.device),
        "changes": changes, "globals": described_plainly(changed_variables(made["globals"])),
        "lost": [*lost, *changed_states(states)],
    }  # fmt: skip


def _put_on(patcher: RankPatcher, model: ComfyModel, on_model: list[Any], job: SamplingJob) -> None:
    """Puts on the clone of a model what nodes/describe/sampling_job.py has described `on_model`."""
    objects, options, wrappers, callbacks = on_model
    if job.mask is not None:
        patcher.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, KEY, _mask_wrapper(job.mask, patcher.load_device))
    for name, value in objects.items():
        patcher.add_object_patch(name, value)
    patcher.model_options.update(options)
    for groups, add in (wrappers, patcher.add_wrapper_with_key), (callbacks, patcher.add_callback_with_key):
        for kind, key, functions in groups:
            for function in functions:
                add(kind, key, function)
    if model.attention is not None:
        patcher.model_options["transformer_options"].setdefault("optimized_attention_override", model.attention)
    if model.stages is not None and job.batch_coupled:
        patcher.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, KEY, model.stages.shared_forward)


def _mask_wrapper(mask: Tensor, device: torch.device) -> Callable[..., Tensor]:
    """Returns an OUTER_SAMPLE wrapper that sets the job's mask, which the host's ComfyUI has prepared."""

    def sample(
        executor: Any, noise: Tensor, latent: Tensor, sampler: Any, sigmas: Tensor, _: None, *args: Any, **kwargs: Any
    ) -> Tensor:
        # To prepare it again would mix up the masks of several images.
        prepared = mask.to(device, copy=True)
        return executor(noise, latent, sampler, sigmas, prepared, *args, **kwargs)

    return sample


def _apply_model_wrapper(
    model: ComfyModel, progress: Progress, watched: Callable[[], AbstractContextManager[Any]], *, batch_coupled: bool
) -> Callable[..., Any]:
    """Returns an APPLY_MODEL wrapper that reports each evaluation and divides its entries over the batch groups."""

    def apply(executor: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        progress.before_evaluation()
        evaluate = partial(entry_by_entry, executor) if model.stages and not batch_coupled else executor
        with watched():
            return model.data_parallel(evaluate, x.shape[0], x, *args, batch_coupled=batch_coupled, **kwargs)

    return apply


@contextmanager
def _watched(model: ComfyModel, patchers: Sequence[RankPatcher], unchanged: Unchanged) -> Iterator[None]:
    """Raises Refused for a split network that a pack has changed by now. Has another one run with the change."""
    change = unchanged.change()
    if change and (model.parallelism.splits_tokens or model.stages is not None):
        raise Refused("network.meanwhile", what=change)
    with _running_changed_code(model, patchers) if change else nullcontext():
        yield


def _watched_forward(watched: Callable[[], AbstractContextManager[Any]], executor: Any, *args: Any, **kw: Any) -> Any:
    """A DIFFUSION_MODEL wrapper inside those of packs, which may replace code for the time of the forward."""
    with watched():
        return executor(*args, **kw)


@contextmanager
def _running_changed_code(model: ComfyModel, patchers: Sequence[RankPatcher]) -> Iterator[None]:
    """Has the networks, in this context, record nothing, and call what ComfyUI's own would. May be nested."""
    before, model.runs_changed_code = model.runs_changed_code, True
    try:
        with ExitStack() as stack:
            for patcher in patchers:
                stack.enter_context(patcher.casting_as_natively())
            yield
    finally:
        model.runs_changed_code = before


def _control_wrapper(controls: list[ControlBase], model: ComfyModel, *, batch_coupled: bool) -> Callable[..., Any]:
    """Returns a SAMPLER_SAMPLE wrapper, which starts after ComfyUI has prepared the ControlNets."""

    def sample(executor: Any, *args: Any, **kwargs: Any) -> Any:
        with own_entries(() if batch_coupled else controls, model.mesh.data), divided(controls, model):
            return executor(*args, **kwargs)

    return sample


def _sample(job: SamplingJob, guider: comfy.samplers.CFGGuider, sampler: Any, on_step: OnStep) -> Tensor:
    # What a pack's guider does in a `sample` of its own has run in ComfyUI's process.
    return _packed(comfy.samplers.CFGGuider.sample(
        guider, _unpacked(job.noise, job), _unpacked(job.latent, job), sampler, job.sigmas.clone(), disable_pbar=True,
        callback=lambda step, x0, x, total: on_step(step, _packed(x0), _packed(x), total), seed=job.seed,
    ))  # fmt: skip


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


class Branches:
    """A CALC_COND_BATCH wrapper that divides branches over batch groups; not those of a `batch_coupled` job."""

    def __init__(self, model: ComfyModel, job: SamplingJob, progress: Progress, noise: SamplerNoise) -> None:
        self._entries_per_call = job.entries_per_call
        self._stages = None if job.batch_coupled else model.stages
        self._groups = MeshDim() if job.batch_coupled else model.mesh.cfg
        self._progress, self._noise = progress, noise

    def __call__(
        self, executor: Any, model: Any, conds: BranchConds, x: Tensor, timestep: Tensor, model_options: dict[str, Any]
    ) -> list[Tensor]:
        """Returns a denoised prediction [B, C, (T,) H, W] for each branch, as `calc_cond_batch` does."""
        self._progress.vote()
        limited = _limited_batches(model, x.shape[0] if self._stages else self._entries_per_call)
        with self._noise.paused(), limited:
            return self._evaluate_split(executor, model, conds, x, timestep, model_options)

    def _evaluate_split(self, executor: Any, model: Any, conds: BranchConds, x: Tensor, *args: Any) -> list[Tensor]:
        branches = [index for index, cond in enumerate(conds) if cond is not None]
        if self._groups.size == 1 or len(branches) < 2:
            return self._evaluate(executor, branches, model, conds, x, *args)
        local = [branches[position] for position in local_items(self._groups, len(branches))]
        local_conds: BranchConds = [cond if index in local else None for index, cond in enumerate(conds)]
        with refuse_on_all_ranks(self._groups):  # else the others wait in all_gather forever
            out = self._evaluate(executor, local, model, local_conds, x, *args)
        predictions = torch.stack([out[index] for index in local]) if local else x.new_empty((0, *x.shape))
        for index, prediction in zip(branches, all_gather(self._groups, predictions, len(branches)), strict=True):
            out[index] = prediction
        return out

    def _evaluate(self, executor: Any, branches: list[int], *arguments: Any) -> list[Tensor]:
        """Returns the predictions of these branches; in a pipeline, those of its last stage."""
        if self._stages is None or not branches:
            return executor(*arguments)
        with self._stages.in_flight():
            out = executor(*arguments)
            (predictions,) = self._stages.share_outputs([torch.stack([out[index] for index in branches])])
        for index, prediction in zip(branches, predictions, strict=True):
            out[index] = prediction
        return out


@contextmanager
def _limited_batches(model: Any, most: int) -> Iterator[None]:
    """Limits ComfyUI's batches to `most` entries on all ranks; ComfyUI alone would go by each rank's free memory."""
    before = model.memory_required
    if most:
        model.memory_required = lambda shape, *args, **kwargs: 0 if shape[0] <= most else math.inf
    try:
        yield
    finally:
        model.memory_required = before


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
    cache = model.cache = StepCache(model.network, model.architecture.plan, model.mesh, threshold)
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

    patcher.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, KEY, predict)
    patcher.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, KEY, evaluate_branches_separately)
    patcher.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, evaluate)
    try:
        with cache.caching():
            yield cache
    finally:
        model.cache = None


def evaluate_branches_separately(executor: Any, model: Any, conds: list[Any], x: Tensor, *args: Any) -> list[Tensor]:
    """Calls `calc_cond_batch` a branch at a time: the step cache decides for each then, as in several batch groups."""
    out = [torch.zeros_like(x)] * len(conds)
    for index, cond in enumerate(conds):
        if cond is not None:
            only_this = [cond if position == index else None for position in range(len(conds))]
            out[index] = executor(model, only_this, x, *args)[index]
    return out


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


class Unchanged:
    """What a network's modules, and the code of their classes and of torch's layers, are as a run begins: `begin`."""

    def __init__(self, network: nn.Module) -> None:
        self._network = network

    def begin(self) -> None:
        self._before, self._code = _modules(self._network), _code_of(self._network)

    def change(self) -> str:
        """Returns, on every rank alike, a module that is another one by now, or a method; "" where there is none."""
        now = _modules(self._network)
        changed = next((name for name in now if now[name] != self._before.get(name)), None)
        if changed is not None:
            return changed or type(self._network).__name__
        code = _code_of(self._network)
        replaced = (place for place in code if code[place] is not self._code.get(place))
        return next((f"{owner.__name__}.{name}" for owner, name in replaced), "")


def _modules(network: nn.Module) -> dict[str, Any]:
    """Returns for each module its class, and which methods of its own and children it has. ComfyUI leaves the class's
    methods on modules that it has unpatched, so names alone do not tell."""
    return {name: (type(module), _own_methods(module), [*map(id, module._modules.values())])
            for name, module in network.named_modules()}  # fmt: skip


def _code_of(network: nn.Module) -> dict[tuple[Any, str], Any]:
    """Returns by owner and name the methods of the modules' classes, torch's among them, and what torch's layers call:
    a split network runs other code than these in places."""
    owners = {base for module in network.modules() for base in type(module).__mro__} | {nn.functional}
    return {(owner, name): code for owner in owners for name, code in vars(owner).items() if callable(code)}


def _own_methods(module: nn.Module) -> list[tuple[str, int]]:
    kind = type(module)
    return [(name, id(value)) for name, value in vars(module).items() if callable(value) and hasattr(kind, name)]
