"""Describes a MODEL, and one run of a guider and sampler on it, for the workers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import comfy.model_management
import comfy.samplers
import torch
from comfy.controlnet import ControlLora
from comfy.hooks import EnumHookType
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from torch import Tensor, nn

from ...parallel_runtime.accelerators import CUDA
from ...parallel_runtime.architectures import Architecture, architecture_of
from ...parallel_runtime.architectures.block_patches import see_all_tokens
from ...parallel_runtime.architectures.network_modules import blocks_of, self_chosen_kernels
from ...parallel_runtime.architectures.partition import Load
from ...parallel_runtime.architectures.row_plan import RowArchitecture
from ...parallel_runtime.architectures.split_plan import SplitPlan
from ...parallel_runtime.architectures.stage_units import units_of, why_not_in_patches
from ...parallel_runtime.errors import quoted
from ...parallel_runtime.jobs import PARTNER, SamplingJob
from ...parallel_runtime.loading.random_states import random_states
from ...parallel_runtime.planning.network_stats import NetworkStats, Work
from ...parallel_runtime.planning.plan_inputs import PlanInputs
from ...parallel_runtime.planning.request_checks import check_run_in_patches, check_stages, check_step_cache
from ...parallel_runtime.request import ParallelRequest
from ...parallel_runtime.specs import ModelSpec
from .comfy_objects import LOCAL, PLAIN, Describer, Unsendable, describe, qualified_name, reference
from .control_nets import controls_of, count_residuals, needs_full_latent, weight_bytes
from .foreign_code import check_layers, check_loop, check_model, check_network
from .input_checks import check_guider, check_latent, partner_of, unwrap_sampler, uses_network
from .local_devices import plan_inputs
from .model_patches import (
    OVERRIDE,
    check_network_patches,
    compilation,
    describe_functions,
    describe_options,
    describe_weight_patches,
    replaced_attributes,
    wrappers_of,
)
from .origin import is_gguf, model_spec
from .pre_encoding import LatentSize, latent_size
from .shared_state import keeps_state

GUIDES = "guide_attention_entries"  # of a condition
SENDABLE_OBJECT_PATCHES = {"model_sampling", "manual_cast_dtype"}  # object patches that workers can have


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """Describes a MODEL for the workers: what they load, its weight patches, and its network's stats for planning."""

    spec: ModelSpec
    weight_patches: dict[str, list[Any]]
    network: nn.Module
    architecture: Architecture | None
    stats: NetworkStats
    batch_coupled: bool  # something on MODEL sees all prompts and images at once, so no workers may share them out
    no_lse: bool  # something on MODEL replaces the attention, without a log-sum-exp
    recorded: bool = False  # its evaluations may be recorded as CUDA graphs
    images_coupled: bool = False  # the images of a prompt are computed together: workers may share out prompts alone

    def undivided(self, by: str) -> Source:
        """Returns this MODEL with its network undivided, because `by`, inside its blocks, needs all tokens."""
        return replace(self, architecture=None, stats=self.stats.undivided(f"{type(self.network).__name__} with {by}"))

    def sampled_by(self, sampler: comfy.samplers.Sampler) -> Source:
        """Returns this MODEL under a SAMPLER. One that uses the network itself makes it undivided and batch-coupled."""
        if not uses_network(sampler):
            return self
        return replace(self.undivided(unwrap_sampler(sampler).__name__), batch_coupled=True)

    def guided_by(self, conds: Mapping[str, list[dict[str, Any]]]) -> Source:
        """Returns this MODEL under these conditions. LTX-2's guides whose strength is not 1 give each query a mask of
        its own, by its place in the whole sequence: the network stays undivided."""
        guides = [guide for prompt in conds.values() for cond in prompt for guide in cond.get(GUIDES) or ()]
        masked = any(guide["strength"] != 1 or guide.get("pixel_mask") is not None for guide in guides)
        return self.undivided("guides whose strength is not 1") if masked else self

    def with_models_of(self, conds: Mapping[str, list[dict[str, Any]]]) -> Source:
        """Returns this MODEL in a run with the ControlNets and GLIGEN models of these conditions, which are replicated
        on every worker."""
        controls, gligens = controls_of(conds), gligens_of(conds)
        if not controls and not gligens:
            return self
        sizes = (comfy.model_management.module_size(gligen.model) for gligen in gligens)
        more: dict[str, Any] = {
            "weight_bytes": self.stats.weight_bytes + weight_bytes(controls) + sum(sizes),
            "residuals": count_residuals(controls, self.stats.layers),
        }
        if any(isinstance(control, ControlLora) for control in controls):  # its network is made of the MODEL's weights
            more |= {"blocks": (), "name": f"{self.stats.name} with a Control-LoRA"}
        coupled = self.images_coupled or bool(gligens)
        return replace(self, stats=replace(self.stats, **more), images_coupled=coupled)

    def with_partner(self, other: Source) -> Source:
        """Returns this MODEL with the one that a guider evaluates the negative prompt with. Workers have both, and keep
        the blocks of both in the same places. Raises ValueError for networks that are not split alike."""
        own, others = self.stats, other.stats
        if self.architecture is not other.architecture or (own.heads, own.width) != (others.heads, others.width):
            raise ValueError("networks that are not split alike")
        patches = {f"{PARTNER}{key}": value for key, value in other.weight_patches.items()}
        fingerprints = (self.spec.patches_fingerprint, other.spec.patches_fingerprint)
        spec = replace(
            self.spec,
            partner=replace(other.spec, patches_fingerprint=""),
            patches_fingerprint=" and ".join(fingerprints) if any(fingerprints) else "",
        )
        stats = replace(
            own,
            weight_bytes=own.weight_bytes + others.weight_bytes,
            blocks=tuple(map(sum, zip_longest(own.blocks, others.blocks, fillvalue=0))),
            loads=(),
        )
        return replace(
            self,
            spec=spec,
            weight_patches={**self.weight_patches, **patches},
            stats=stats,
            batch_coupled=self.batch_coupled or other.batch_coupled,
            images_coupled=self.images_coupled or other.images_coupled,
            no_lse=self.no_lse or other.no_lse,
            recorded=False,
        )

    def inputs(
        self, request: ParallelRequest, work: Work | None = None, *, guided: bool = False, batch_coupled: bool = False
    ) -> PlanInputs:
        """Returns PlanInputs on this machine. Raises Refused for a step cache or stages that the network lacks."""
        check_step_cache(request, self.stats)
        check_stages(request, self.stats)
        return plan_inputs(
            request,
            work=work,
            heads=self.stats.heads,
            guided=guided,
            batch_coupled=batch_coupled,
            images_coupled=self.images_coupled,
            no_lse=self.no_lse,
            undivided="" if self.stats.divisible else self.stats.name,
            by_rows=self.stats.name if self.stats.row_levels else "",
        )

    def check_patches(
        self, request: ParallelRequest, latent_shape: tuple[int, ...], text: int, steps: int | None = None
    ) -> None:
        """Raises Refused for a latent or a run that cannot be sampled in patches."""
        if self.architecture is not None:
            main = self.tokens(latent_shape, text).get(self.architecture.plan.main_stream, 0)
            check_run_in_patches(request, main, steps)

    def tokens(self, latent_shape: tuple[int, ...], text: int) -> dict[str, int]:
        """Returns the tokens of each stream, for a latent [B, C, (T,) H, W] and a prompt of `text` tokens."""
        return self.architecture.tokens(self.network, latent_shape, text) if self.architecture else {}

    def work(self, latent_shape: tuple[int, ...], text: int, *, prompts: int = 1, cached: bool = False) -> Work:
        tokens = sum(self.tokens(latent_shape, text).values())
        recorded = self.recorded and not cached
        work = self.stats.work(latent_shape[0], tokens, prompts=prompts, cached=cached, recorded=recorded)
        if not isinstance(self.architecture, RowArchitecture):
            return work
        return replace(work, row_ranks=self.architecture.row_ranks(self.network, latent_shape))


def describe_model(model: ModelPatcher, request: ParallelRequest) -> Source:
    """Describes a MODEL. Raises Refused where no worker can have its network."""
    dtype = request.dtype
    check_network_patches(model)
    cast = model.object_patches.get("manual_cast_dtype")
    requested_dtype = dtype if dtype != "auto" else "" if cast is None else str(cast).removeprefix("torch.")
    spec = model_spec(model)
    network = native_network(model)
    check_model(model)
    check_network(network)
    if not is_gguf(model):  # which is loaded with that pack's layers, in the workers too
        check_layers(network)
    architecture = architecture_of(network)
    options = model.model_options["transformer_options"]
    by_rows, replaced = isinstance(architecture, RowArchitecture), OVERRIDE in options
    undivided_by = [] if by_rows else see_all_tokens(options.get("patches", {}))
    if not replaced and request.options.attention_backend == "auto":
        undivided_by += [f"{function} in {module}" for function, module in self_chosen_kernels(network).items()]
    compiled = compilation(model, request.compile)
    if by_rows and compiled is not None:
        undivided_by.append("torch.compile")
    comfyui_dtype = cast or model.model.get_dtype_inference()
    batch_coupled = is_batch_coupled(model, model.model_options)
    images_coupled = architecture is not None and architecture.images_coupled(network)
    patch_models = dict.fromkeys(patch.model for patch in model.model_patches_models())
    weight_bytes = sum(map(comfy.model_management.module_size, [network, *patch_models]))
    item_bytes = (comfyui_dtype if dtype == "auto" else getattr(torch, dtype)).itemsize
    graphs = request.options.cuda_graphs != "off" and comfy.model_management.get_torch_device().type == CUDA.kind
    source = Source(
        spec=replace(
            spec,
            compute_dtype=requested_dtype,
            patches_fingerprint=str(model.patches_uuid) if model.patches else "",
            compilation=compiled,
        ),
        weight_patches=describe_weight_patches(model),
        network=network,
        architecture=architecture,
        no_lse=replaced,
        batch_coupled=batch_coupled,
        recorded=graphs and not (batch_coupled or images_coupled or replaced),
        images_coupled=images_coupled,
        stats=_network_stats(network, architecture, weight_bytes, item_bytes),
    )
    return source.undivided(", ".join(undivided_by)) if undivided_by else source


def _network_stats(
    network: nn.Module, architecture: Architecture | None, weight_bytes: int, item_bytes: int
) -> NetworkStats:
    stats = NetworkStats(
        name=type(network).__name__, divisible=False, skippable=False, heads=1, layers=0, width=0,
        weights=sum(parameter.numel() for parameter in network.parameters()),
        weight_bytes=weight_bytes, item_bytes=item_bytes,
    )  # fmt: skip
    if architecture is None:
        return stats
    plan = architecture.plan
    return replace(
        stats,
        name=architecture.name,
        divisible=True,
        skippable=bool(plan.trunk),
        heads=architecture.heads(network),
        layers=architecture.layers(network),
        width=architecture.width(network),
        blocks=tuple(map(comfy.model_management.module_size, blocks_of(network, plan))),
        loads=_unit_loads(network, plan),
        unpatched=why_not_in_patches(plan),
        row_levels=architecture.row_levels(network) if isinstance(architecture, RowArchitecture) else (),
    )


def _unit_loads(network: nn.Module, plan: SplitPlan) -> tuple[Load, ...]:
    size = comfy.model_management.module_size
    return tuple(Load(sum(size(ref.block) for ref in unit), len(unit)) for unit in units_of(network, plan))


def is_batch_coupled(model: ModelPatcher, options: dict[str, Any]) -> bool:
    """Must every worker evaluate all prompts and images with these model options? A wrapper around the network
    (EasyCache) may decide for all by one of them, and SelfAttentionGuidance keeps one prompt's attention."""
    around = bool(wrappers_of(model, options, WrappersMP.DIFFUSION_MODEL)) or keeps_state(model, options)
    return around or network_couples_batch(native_network(model), options.get("transformer_options", {}))


def native_network(model: ModelPatcher) -> nn.Module:
    """Returns MODEL's network; of one without weights (remote/remote_model.py) the network that the workers have."""
    network = model.model.diffusion_model
    return vars(network).get("network", network)


def gligens_of(conds: Mapping[str, list[dict[str, Any]]]) -> list[ModelPatcher]:
    """Returns the GLIGEN models of these conditions, each once. They make as many boxes as there are images in a
    batch."""
    models = (cond["gligen"][1] for prompt in conds.values() for cond in prompt if cond.get("gligen"))
    return list(dict.fromkeys(models))


def network_couples_batch(network: nn.Module, options: dict[str, Any]) -> bool:
    """Does `network`, or a patch inside it (NAG), compute with all prompts and images of its batch?"""
    known = architecture_of(network)
    return any(options.get("patches", {}).values()) or (known is not None and known.batch_coupled(network))


def couples_by_masks(network: nn.Module, *masks: Tensor | None) -> bool:
    """Do noise masks [B, ...] that differ between images couple them in `network`? LTX takes the first image's mask for
    all, and a maximum over the batch."""
    calls = [vars(kind)["forward"] for kind in type(network).__mro__ if "forward" in vars(kind)]
    if not any("denoise_mask" in inspect.signature(call).parameters for call in calls):
        return False
    return any(bool((mask != mask[:1]).any()) for mask in masks if mask is not None)


def describe_job(
    guider: comfy.samplers.CFGGuider,
    source: Source,
    noise: Tensor,
    latent: Tensor,
    sampler: comfy.samplers.Sampler,
    sigmas: Tensor,
    mask: Tensor | None,
    seed: int | None,
    latent_shapes: list | None,
) -> SamplingJob:
    """Describes one call of `guider.outer_sample`. Raises Refused for a latent that the MODEL cannot take, Unsendable
    where the loop has to stay in ComfyUI's process."""
    several = latent_shapes is not None and len(latent_shapes) > 1
    if not several:
        check_latent(guider.model_patcher, noise)
    kind, attributes = check_guider(guider)
    model, partner, options = guider.model_patcher, partner_of(guider), guider.model_options
    check_loop()
    shape = latent_shapes[0] if latent_shapes else noise.shape
    size = latent_size(source.network, shape)
    batch_coupled = source.batch_coupled or is_batch_coupled(model, options) or couples_by_masks(source.network, mask)
    return SamplingJob(
        guider=kind,
        guider_attributes=attributes,
        sampler=describe(sampler, "the SAMPLER"),
        noise=noise,
        latent=latent,
        mask=mask,
        sigmas=sigmas,
        seed=seed,
        random_states=random_states(model.load_device),
        **_describe_on_model(model, options, size),
        partner=None if partner is None else _describe_on_model(partner, partner.model_options, size) | {"mask": None},
        weight_patches=source.weight_patches,
        batch_coupled=batch_coupled,
        images_coupled=source.images_coupled or bool(gligens_of(guider.conds)),
        latent_shapes=[list(shape) for shape in latent_shapes or ()] if several else None,
        conds=describe_conds(guider.conds, options, tuple(shape)),
    )


def _describe_on_model(model: ModelPatcher, options: dict[str, Any], size: LatentSize | None) -> dict[str, Any]:
    """Describes what is on a MODEL, with these model options: fields of a SamplingJob. Raises Unsendable."""
    _check_sendable(model, options)
    describer = Describer()
    return {
        "model_sampling": _describe_model_sampling(model.get_model_object("model_sampling")),
        "attributes": replaced_attributes(model),
        "model_options": describe_options(options, size, describer),
        "wrappers": describe_functions(options["transformer_options"].get("wrappers", {}), "wrapper", describer),
        "callbacks": describe_functions(model.callbacks, "callback", describer),
    }


def _check_sendable(model: ModelPatcher, options: dict[str, Any]) -> None:
    if "registered_hooks" in options and options["registered_hooks"].get_type(EnumHookType.TransformerOptions):
        raise Unsendable("unsendable.hook")
    for name in model.object_patches.keys() - SENDABLE_OBJECT_PATCHES - replaced_attributes(model).keys():
        raise Unsendable("unsendable.replaced", name=name)
    for name, models in model.additional_models.items():
        if models:
            raise Unsendable("unsendable.models", name=name)


def describe_conds(
    conds: dict[str, list[dict[str, Any]]], options: dict[str, Any], latent: tuple[int, ...] | None
) -> Any:
    """Describes converted conditions, without the `uuid` that ComfyUI makes anew, for a `latent` of this shape; None:
    hints that a VAE has to encode are left out. Raises Unsendable."""
    what = "the CONDITIONING"
    if needs_full_latent(conds, options):
        raise Unsendable("unsendable.control.part", what=what)
    sendable = {
        name: [{key: value for key, value in cond.items() if key != "uuid"} for cond in prompt]
        for name, prompt in conds.items()
    }
    return Describer(latent).describe(sendable, what)


def _describe_model_sampling(sampling: torch.nn.Module) -> dict[str, Any]:
    kind = type(sampling)  # ComfyUI makes most of these classes in a function, from bases that have a name
    bases = kind.__bases__ if LOCAL in kind.__qualname__ else (kind,)
    if kind not in bases and any(map(callable, vars(kind).values())):
        raise Unsendable("unsendable.sampling", kind=qualified_name(kind))
    attributes = {name: value for name, value in vars(sampling).items() if name not in vars(nn.Module())}
    for name, value in attributes.items():
        if not isinstance(value, Tensor) and not _is_plain(value):
            raise Unsendable("unsendable.value", name=name, value=quoted(value))
    return {
        "bases": [reference(base, "the model sampling") for base in bases],
        "attributes": attributes,
        "buffers": dict(sampling.named_buffers()),
    }


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, list | tuple) and all(map(_is_plain, value)))
