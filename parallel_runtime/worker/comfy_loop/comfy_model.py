"""One of ComfyUI's models on this rank: ComfyUI's own ModelPatcher, its weight patches, and a job's clone; and an
EvaluationJob: one call of its network for a sampler that runs in ComfyUI's process."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import Any

import comfy.model_management
import comfy.utils
import torch
from comfy.controlnet import ControlBase
from comfy.patcher_extension import WrappersMP
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ...architectures import architecture_of
from ...architectures.network_modules import blocks_of
from ...engine.comm.collectives import all_gather_int, any_rank, refuse_on_all_ranks
from ...engine.comm.mesh import MeshDim
from ...engine.comm.ranks import rank
from ...engine.graph_runner import Unrecordable
from ...engine.prefetch import RankPlacement
from ...errors import Refused, quoted
from ...jobs import MAX_CACHED_CONDS, Described, EvaluationJob, Job, SamplingJob, is_outer_method
from ...loading.code_names import asked, import_pack, named, packs_named, qualified_name
from ...loading.mapped import load_mapped, load_same, network_fingerprint
from ...loading.object_codec import PLAIN, rebuild
from ...loading.replaced_code import check_replaced, replaced_code
from ...specs import Compilation, ModelSpec, Parallelism
from ..models import Model
from ..progress import Progress
from ..step_cache import StepCache
from .additional_models import AdditionalModels
from .patcher import UNLIMITED_BYTES, DynamicVram, OffloadSet, RankPatcher, WeightState, unload

PRECISIONS = (torch.float32, torch.float16, torch.bfloat16)  # those that older cards support come first
OPTIONS = "transformer_options"
OVERRIDE = "optimized_attention_override"
UNUSED_OPTIONS = ("uuids", "callbacks")  # for the loop around the network, which does not read them
FORWARDS = ("forward", "_forward")  # ComfyUI's process may have done what `forward` does beside `_forward`
OUTER_WRAPPERS = {value for name, value in vars(WrappersMP).items() if name.isupper()} - {WrappersMP.DIFFUSION_MODEL}


@dataclass(eq=False)
class ComfyModel(Model):
    """`patcher` is the loaded model without patches; `weight_patches` are the last job's: their fingerprint, and the
    patches by weight. `partner` is the model of the negative prompt, where a guider has two MODELs."""

    patcher: Any = None
    weight_patches: tuple[str, dict[str, list[Any]]] = field(default=("", {}))
    cache: StepCache | None = None  # the step cache of the run in progress
    additional: AdditionalModels = field(default_factory=AdditionalModels)  # one for all models of this rank
    replaced_in_place: dict[str, Any] = field(default_factory=dict)  # by `set_attributes`: the values before
    partner: ComfyModel | None = None
    takes_turns: bool = False  # with another network, in one run
    runs_changed_code: bool = False  # of a pack, which changes it during the run

    def __post_init__(self) -> None:
        super().__post_init__()
        self.graph_runner.visible_kwargs = self.recordable_arguments
        self.graph_runner.settings = self.replaced_attributes
        self.patcher.weight_state.on_move = self.graph_runner.discard
        if self.partner is not None:
            self.takes_turns = self.partner.takes_turns = True

    @property
    def nonresident_bytes(self) -> int:
        state = self.patcher.weight_state
        own: int = state.in_file_bytes + state.given_back_in_file_bytes
        if state.prefetcher is not None:
            own += state.prefetcher.nonresident_bytes + state.prefetcher.source.given_back_bytes
        return own if self.partner is None else own + self.partner.nonresident_bytes

    @cached_property
    def own_compute_dtype(self) -> torch.dtype | None:
        """Returns the dtype in which this rank's ComfyUI computes, read before any clone has set another."""
        dtype: torch.dtype = self.patcher.model.get_dtype_inference()
        return dtype

    @cached_property
    def common_compute_dtype(self) -> torch.dtype | None:
        """Returns the dtype in which all ranks compute where ComfyUI would choose several; else None. Collective."""
        # Ranks exchange tensors of one dtype, and a card may have no bfloat16.
        local = self.own_compute_dtype
        ranks = all_gather_int(PRECISIONS.index(local) if local in PRECISIONS else len(PRECISIONS))
        return PRECISIONS[min(ranks)] if len(set(ranks)) > 1 else None

    @property
    def dim(self) -> MeshDim | None:
        """The ranks that have the model; None for all."""
        return None

    @property
    def remote_paths(self) -> list[str]:
        """The modules that only other ranks have, by their names in the patched model."""
        return [f"diffusion_model.{block.path}" for block in (self.stages.remote_blocks if self.stages else ())]

    def split(self, parallelism: Parallelism) -> None:
        super().split(parallelism)
        if self.partner is not None and self.spec.partner is not None:
            self.partner.spec = self.spec.partner
            self.partner.parallelize(self.mesh, parallelism)

    def set_attributes(self, attributes: str) -> None:
        model = self.patcher.model
        for name, value in self.replaced_in_place.items():
            comfy.utils.set_attr(model, name, value)
        changed = json.loads(attributes or "{}")
        self.replaced_in_place = {name: comfy.utils.set_attr(model, name, value) for name, value in changed.items()}
        self.clear_kv_cache()

    def compile(self, compilation: Compilation | None) -> None:
        super().compile(compilation)
        if self.partner is not None:
            self.partner.compile(self.spec.partner.compilation if self.spec.partner else None)

    def place_weights(self, placement: RankPlacement | None) -> None:
        """Keeps the weights there from the next load on; None replicates them on the device."""
        state, plan = self.patcher.weight_state, self.architecture.plan if self.architecture else None
        placement = placement if plan else None
        if placement is not (state.offload_set and state.offload_set.placement):
            self.offload()
            blocks = blocks_of(self.network, plan) if plan else []
            state.offload_set = OffloadSet.of(self.network, blocks, placement) if placement else None
        if self.partner is not None:
            self.partner.place_weights(placement)

    def load(self, patchers: Sequence[RankPatcher], controls: Sequence[ControlBase] = ()) -> None:
        """Loads `patchers` to the device, with the networks of these ControlNets, of GLIGEN and VAEs."""
        device, networks = patchers[0].load_device, dict.fromkeys(one for each in controls for one in each.get_models())
        networks |= dict.fromkeys(self.additional.unlisted(self))
        if device.type != "cpu":
            patches = [patch for patcher in patchers for patch in patcher.model_patches_models()]
            loading = [*patchers, *patches, *networks]
            needed = 1.1 * sum(one.model_size() - one.loaded_size() for one in loading)
            needed += comfy.model_management.minimum_inference_memory()
            # Where any rank has too little memory, all unload their other models: ranks that gather weights must have
            # the same ones loaded, and ComfyUI would decide by each rank's own memory.
            if any_rank(comfy.model_management.get_free_memory(device) < needed):
                loaded = comfy.model_management.current_loaded_models
                kept = [model for model in loaded if any(one.is_clone(model.model) for one in loading)]
                comfy.model_management.free_memory(UNLIMITED_BYTES, device, kept)
        for other in comfy.model_management.current_loaded_models:
            other.currently_used = False  # what is in use is loaded again once a VAE has encoded a picture
        comfy.model_management.load_models_gpu([*patchers, *networks])

    def clear_kv_cache(self) -> None:
        """Clears the keys of a prompt that HiDream O1 and Qwen-Image 2.1 keep: they depend on the weights of the run
        before, and on how the heads were shared out."""
        if self.partner is not None:
            self.partner.clear_kv_cache()
        if (clear := getattr(self.network, "clear_kv_cache", None)) is not None:
            clear()
        if (reset := getattr(self.network, "reset_prefix_cache", None)) is not None:
            reset(self.network.prefix_cache_enabled)

    def replaced_attributes(self) -> Hashable:
        """Returns the plain values with which nodes have replaced attributes of the network. With code in it nothing is
        recorded."""
        patches = getattr(self.patcher.model.current_patcher, "object_patches", {})
        plain = ((name, value) for name, value in patches.items() if isinstance(value, PLAIN))
        inside_network = ((name, value) for name, value in plain if name.startswith("diffusion_model."))
        return tuple((name, type(value), value) for name, value in sorted(inside_network, key=itemgetter(0)))

    def unrecordable_reason(self) -> str:
        current = self.patcher.model.current_patcher
        if self.patcher.weight_state.offload_set is not None:
            return "weights are fetched block by block"
        if self.cache is not None:
            return "a step cache decides which blocks run"
        if current is not None and (current.hook_patches or current.forced_hooks):
            return "hooks (scheduled LoRA) change weights from step to step"
        if self.runs_changed_code:
            return "a pack's code changes it during the run"
        if self.takes_turns:
            return "two MODELs take turns"
        if getattr(self.network, "prefix_cache_enabled", False):
            return "it keeps keys of its prompt from step to step"
        return super().unrecordable_reason()

    def recordable_arguments(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Returns the `kwargs` of the network's call without options that its code does not read.

        Raises Unrecordable for code that runs inside the network: it may decide by value, or change from step to step;
        and for tensors in lists or dicts, where the network may store its own, as causal Wan does."""
        if (all_options := kwargs.get(OPTIONS)) is None:
            return kwargs
        options = {name: value for name, value in all_options.items() if name not in UNUSED_OPTIONS}
        wrappers = {kind: by_key for kind, by_key in options.pop("wrappers", {}).items() if kind not in OUTER_WRAPPERS}
        patches, replaced = options.get("patches") or {}, options.get("patches_replace") or {}
        for what, by_kind in ("wrappers", wrappers), ("patches", patches), ("replaced blocks", replaced):
            if kinds := sorted(str(kind) for kind, functions in by_kind.items() if functions):
                raise Unrecordable(f"{what} inside the network ({', '.join(kinds)})")
        if options.get(OVERRIDE) is not self.attention:
            raise Unrecordable("a node replaces the attention")
        for name, value in options.items():
            if any(isinstance(leaf, Tensor) for leaf in tree_leaves(value) if leaf is not value):
                raise Unrecordable(f"the network may keep something in {name}")
        return {**kwargs, OPTIONS: options}

    def clone(self, patches: Described | None, on_progress: Callable[[float], None]) -> RankPatcher:
        """Returns a MODEL with `patches`, as `describe_weight_patches` describes them, of `spec.patches_fingerprint`.
        None stands for the last job's; raises Refused if those were others."""
        if self.weight_patches[0] != self.spec.patches_fingerprint:
            if patches is None:
                raise Refused("weights.unsent")
            with refuse_on_all_ranks(self.dim):  # one may lack a pack that has code of them
                self.weight_patches = (self.spec.patches_fingerprint, rebuild(patches))
            self.clear_kv_cache()
        made: RankPatcher = self.patcher.clone()
        made.on_progress = on_progress
        made.patches = {key: list(value) for key, value in self.local_patches(self.weight_patches[1]).items()}
        name, own = self.spec.compute_dtype, self.own_compute_dtype
        if dtype := getattr(torch, name) if name else self.common_compute_dtype:
            made.set_model_compute_dtype(dtype)
            made.force_cast_weights = self.spec.force_cast or dtype != own
        made.patches_uuid = uuid.uuid5(uuid.NAMESPACE_OID, f"{self.spec.patches_fingerprint} {self.spec.compute_dtype}")
        return made

    def local_patches(self, patches: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Returns the patches of weights that this rank has."""
        remote = tuple(f"{path}." for path in self.remote_paths)
        return {key: value for key, value in patches.items() if not key.startswith(remote)}

    def check_replaced(self, wanted: dict[str, list[str]], *, loop: bool = True) -> None:
        """Raises Refused where packs have not replaced in this process what they have in ComfyUI's: `wanted`, of a
        SamplingJob. Without `loop`, the sampling loop is in ComfyUI's process. Collective."""
        networks = [self.network, *([self.partner.network] if self.partner else ())]
        with refuse_on_all_ranks():
            check_replaced(wanted, replaced_code(networks, merging=bool(self.spec.patches_fingerprint), loop=loop))

    @property
    def additional_weights(self) -> list[Tensor]:
        partner = [] if self.partner is None else self.partner.network.parameters()
        return [*self.additional.weights(self), *partner]

    def offload(self) -> None:
        if self.partner is not None:
            self.partner.offload()
        unload(self.patcher)
        self.patcher.size = 0  # at the next load it may have other blocks
        self.additional.drop(self)

    def onload(self) -> None:
        """Does nothing: ComfyUI loads the clone that a job uses."""

    def give_back(self, nbytes: int) -> None:
        self.patcher.give_back(nbytes)


def import_packs(packs: Sequence[str], files: Mapping[str, dict[str, str]]) -> None:
    """Imports PACK@FINGERPRINTs, with the `files` of each in ComfyUI's process. Raises Refused on all ranks where one
    cannot. Collective."""
    asked.update(packs)
    # On rank 0 first: packs may write files as they are imported.
    for first in (True, False) if packs else ():
        with refuse_on_all_ranks():
            for pack in packs if first == (rank() == 0) else ():
                import_pack(pack, files.get(pack))


def import_loader(spec: ModelSpec) -> None:
    """Imports the pack whose node loads this, if one does. Raises Refused on all ranks where one cannot. Collective."""
    if packs := packs_named(spec.loader):
        import_packs(packs, json.loads(spec.arguments)["pack_files"])


def load(
    additional: AdditionalModels, spec: ModelSpec, device: torch.device, on_progress: Callable[[float], None], job: Job
) -> ComfyModel:
    """Loads the model, after that of the negative prompt. Raises Refused where this rank's ComfyUI has the weights in
    another dtype than the host's, or the node that made a pack's MODEL makes another one. Collective."""
    if isinstance(job, SamplingJob):
        import_packs(job.packs, job.pack_files)  # they may have replaced classes of layers
    import_loader(spec)
    partner = None if spec.partner is None else load(additional, spec.partner, device, on_progress, job)
    on_progress(0.0)
    patcher: Any = load_patcher(spec)
    if patcher is None:
        raise Refused("loader.other", node=qualified_name(named(spec.loader)))
    dtype = str(patcher.model.get_dtype()).removeprefix("torch.")
    if dtype != spec.weight_dtype:
        raise Refused("model.dtype", dtype=dtype, expected=spec.weight_dtype)
    # ComfyUI batches conditioning by free memory, which differs between ranks: here all prompts fit.
    patcher.model.memory_required = lambda *args, **kwargs: 0
    patcher.weight_state = WeightState(dynamic_vram=DynamicVram(patcher.model) if spec.dynamic_vram else None)
    on_progress(1.0)
    network = patcher.model.diffusion_model
    return ComfyModel(
        spec, network, architecture_of(network), patcher=patcher, device=device, additional=additional, partner=partner
    )


def load_patcher(spec: ModelSpec) -> RankPatcher | None:
    """Returns what the loader makes in this worker; None where that has not the spec's fingerprint, if it has one.
    Raises Refused where the node of a pack fails."""

    def decode(value: dict[str, Any]) -> Any:  # the dtypes and enums that nodes/describe/model_source.py encodes
        if value.keys() == {"enum", "name"}:
            return named(value["enum"])[value["name"]]
        return getattr(torch, value["torch.dtype"]) if value.keys() == {"torch.dtype"} else value

    loader, arguments = named(spec.loader), json.loads(spec.arguments, object_hook=decode)
    if isinstance(arguments, list):
        patcher = load_mapped(RankPatcher, loader, arguments, spec.index)
        return patcher if spec.weights_fingerprint in ("", network_fingerprint(patcher)) else None
    return load_same(RankPatcher, loader, arguments, spec.weights_fingerprint, text_encoder=spec.text_encoder)


def evaluate(model: ComfyModel, job: EvaluationJob, progress: Progress) -> dict[str, Any]:
    """Returns {"out": what the network gives: a tensor [B, C_out, (T,) H, W], or several in a list}."""
    if asked and job.cond_arguments is not None:  # once a run; an earlier job's packs may have replaced code
        model.check_replaced({}, loop=False)
    patcher, device = model.clone(job.weight_patches, progress.loading), model.device
    options: dict[str, Any] | None = None
    if job.options is not None:
        with model.additional.of_job(model) as load_additional:
            options = rebuild(job.options, load_additional)
        patcher.model_options["transformer_options"] = options  # so that ComfyUI loads the patches' models
    model.load([patcher])
    progress.heartbeat()
    arguments = {**moved(job.call_arguments, device), **_cond_arguments(model, job, device)}
    if job.method not in FORWARDS and not is_outer_method(job.method):
        raise Refused("job.method", method=quoted(job.method), methods=", ".join(FORWARDS))
    if model.spec.compute_dtype:  # a cp_config may set another one than ComfyUI's process computes in
        times = job.call_arguments.keys() - {next(iter(job.call_arguments), ""), "control"}
        dtype = getattr(torch, model.spec.compute_dtype)
        arguments = {name: value if name in times else _cast(value, dtype) for name, value in arguments.items()}
    if options is not None:
        arguments["transformer_options"] = moved(options, device)
        if model.attention is not None:
            arguments["transformer_options"].setdefault("optimized_attention_override", model.attention)
    if job.method not in FORWARDS:
        return {"out": getattr(model.network, job.method)(**arguments)}
    latents = arguments[next(iter(job.call_arguments))]
    x = latents if torch.is_tensor(latents) else latents[0]
    model.network.forward = getattr(model.network, job.method)  # called with the hooks that split the network
    try:
        out = model.data_parallel(model.network, len(x), batch_coupled=job.batch_coupled, **arguments)
    finally:
        del model.network.forward
    progress.compare_ranks("an evaluation", "prediction", *(out if isinstance(out, list | tuple) else [out]))
    return {"out": out}


def _cond_arguments(model: ComfyModel, job: EvaluationJob, device: torch.device) -> dict[str, Any]:
    """Returns the conditions of the job's prompt: the model keeps its last ones, and a step sends its latent."""
    if job.cond_arguments is not None:
        model.clear_kv_cache()

        def made(described: Described) -> Any:  # out of the memory of the message
            return rebuild(replace(described, tensors={name: one.clone() for name, one in described.tensors.items()}))

        arguments = moved(job.cond_arguments, device)
        model.cond_arguments[job.cond_number] = tree_map_only(Described, made, arguments)
        for oldest in list(model.cond_arguments)[:-MAX_CACHED_CONDS]:
            del model.cond_arguments[oldest]
    if job.cond_number not in model.cond_arguments:
        raise Refused("conds.unsent")
    return model.cond_arguments[job.cond_number]


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Casts the floating-point tensors of a network's argument, as ComfyUI does."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return [_cast(item, dtype) for item in value] if isinstance(value, list) else value


def moved(value: Any, device: torch.device) -> Any:
    """Copies the lists and dicts with every tensor on `device`, out of the memory of the message."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device, copy=True), value)
