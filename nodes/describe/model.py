"""What workers are sent of a MODEL (the loader's call, its files, its weight patches), and what planning knows of it.

A LoRA's strength changes `patches_fingerprint`, and with it what is sent again (group/worker_group.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from types import CodeType
from typing import Any

import torch
from comfy import model_management, sampler_helpers, samplers, sd
from comfy.controlnet import ControlLora
from comfy.model_patcher import ModelPatcher
from torch import nn

from ...parallel_runtime import accelerators, jobs, specs
from ...parallel_runtime.architectures import Architecture, architecture_of, block_patches, network_modules, row_plan
from ...parallel_runtime.errors import Refused
from ...parallel_runtime.group.runtime import runtime
from ...parallel_runtime.group.worker_group import check_size
from ...parallel_runtime.loading import object_codec
from ...parallel_runtime.loading.code_names import Unsendable, is_of_a_pack, qualified_name
from ...parallel_runtime.planning import request_checks, run_plan
from ...parallel_runtime.planning.network_stats import NetworkStats, Work
from ...parallel_runtime.request import ParallelRequest
from . import host, model_patches, model_source, network_parts
from .foreign_code import CodeForGood, check_model, check_none, foreign_layers, layers_of_packs, replaced_on
from .model_files import Conds, count_residuals, describer, encode_bytes, gligens_of, weight_bytes

GUIDES = "guide_attention_entries"  # of a condition


@dataclass(frozen=True, kw_only=True, eq=False)
class DescribedModel:
    """A MODEL in numbers for planning, and as workers get it: `spec`, what they load, and its `weight_patches`."""

    spec: specs.ModelSpec
    weight_patches: jobs.Described
    packs: list[str] = field(default_factory=list)  # those that weight patches have code of, and that code
    code: list[Any] = field(default_factory=list)
    network: nn.Module
    architecture: Architecture | None
    stats: NetworkStats
    runs_changed_code: bool  # a part of the network runs code that is not ComfyUI's
    batch_coupled: bool  # something on MODEL sees all prompts and images at once, so no workers may share them out
    recorded: bool = False  # its evaluations may be recorded as CUDA graphs
    code_for_good: CodeForGood = field(default_factory=CodeForGood)
    partner: DescribedModel | None = None  # the MODEL that a guider evaluates the negative prompt with, if another

    @property
    def stays_native(self) -> bool:
        """Has ComfyUI to sample by itself where it has the loop? An evaluation takes no code along that packs have
        changed for good."""
        models = [self, *([self.partner] if self.partner else ())]
        return any(one.code_for_good.replaced or one.code_for_good.in_place for one in models)

    def undivided(self, by: str) -> DescribedModel:
        """Returns this MODEL with its network undivided, because `by`, inside its blocks, needs all tokens."""
        return replace(self, architecture=None, stats=self.stats.undivided(f"{type(self.network).__name__} with {by}"))

    def sampled_by(self, sampler: samplers.Sampler) -> DescribedModel:
        """Returns this MODEL under a SAMPLER. One that uses the network itself makes it undivided and batch-coupled."""
        if is_of_a_pack(unwrap_sampler(sampler)) or not uses_network(sampler):  # a pack's: seen as it happens
            return self
        return replace(self.undivided(unwrap_sampler(sampler).__name__), batch_coupled=True)

    def guided_by(self, conds: Conds) -> DescribedModel:
        """Returns this MODEL under these conditions. LTX-2's guides whose strength is not 1 give each query a mask of
        its own, by its place in the whole sequence: the network stays undivided. Where conditions have hooks, ComfyUI
        samples with a copy of the MODEL that has no dynamic VRAM."""
        described, has_hooks = self, getattr(sampler_helpers, "cond_has_hooks", None)  # since ComfyUI 0.16
        if has_hooks is not None and any(has_hooks([(None, cond) for cond in prompt]) for prompt in conds.values()):
            described = replace(self, spec=replace(self.spec, dynamic_vram=False))
        guides = [guide for prompt in conds.values() for cond in prompt for guide in cond.get(GUIDES) or ()]
        masked = any(guide["strength"] != 1 or guide.get("pixel_mask") is not None for guide in guides)
        return described.undivided("guides whose strength is not 1") if masked else described

    def with_models_of(self, conds: Conds) -> DescribedModel:
        """Returns this MODEL in a run with these conditions' ControlNets and GLIGEN models, on every worker."""
        controls, gligens = object_codec.controls_of(conds), gligens_of(conds)
        if not controls and not gligens:
            return self
        sizes = (model_management.module_size(gligen.model) for gligen in gligens)
        more: dict[str, Any] = {
            "weight_bytes": self.stats.weight_bytes + weight_bytes(controls) + sum(sizes),
            "residuals": count_residuals(controls, self.stats.layers),
        }
        if any(isinstance(control, ControlLora) for control in controls):  # its network is made of the MODEL's weights
            more |= {"blocks": (), "name": f"{self.stats.name} with a Control-LoRA"}
        coupled = self.stats.images_coupled or bool(gligens)
        return replace(self, stats=replace(self.stats, **more, images_coupled=coupled))

    def with_vaes(self, vaes: Sequence[sd.VAE], latent: tuple[int, ...]) -> DescribedModel:
        """Returns this MODEL where all workers encode with these VAEs, for a `latent` [B, C, (T,) H, W]."""
        if not vaes:
            return self
        size = self.stats.weight_bytes + sum(vae.model_size() for vae in dict.fromkeys(vaes))
        most = max(encode_bytes(vae, latent) for vae in vaes)
        return replace(self, stats=replace(self.stats, weight_bytes=size, encode_bytes=most))

    def with_partner(self, other: DescribedModel) -> DescribedModel:
        """Returns this MODEL with the one that a guider evaluates the negative prompt with. Workers have both, and keep
        the blocks of both in the same places. Raises ValueError for networks that are not split alike, Refused for
        weight patches that are too large together."""
        check_size([self.weight_patches.tensors, other.weight_patches.tensors])
        own, others = self.stats, other.stats
        if self.architecture is not other.architecture or (own.heads, own.width) != (others.heads, others.width):
            raise ValueError("networks that are not split alike")
        fingerprints = (self.spec.patches_fingerprint, other.spec.patches_fingerprint)
        both = " and ".join(fingerprints) if any(fingerprints) else ""
        blocks = tuple(map(sum, zip_longest(own.blocks, others.blocks, fillvalue=0)))
        stats = replace(
            own, weight_bytes=own.weight_bytes + others.weight_bytes, blocks=blocks, loads=(),
            images_coupled=own.images_coupled or others.images_coupled, no_lse=own.no_lse or others.no_lse,
        )  # fmt: skip
        spec = replace(self.spec, partner=other.spec, patches_fingerprint=both)
        return replace(
            self, spec=spec, partner=other, stats=stats, recorded=False,
            batch_coupled=self.batch_coupled or other.batch_coupled,
            runs_changed_code=self.runs_changed_code or other.runs_changed_code,
        )  # fmt: skip

    def inputs(
        self, request: ParallelRequest, work: Work | None = None, *, guided: bool = False, batch_coupled: bool = False
    ) -> run_plan.PlanInputs:
        """Returns PlanInputs on this machine."""
        network = self.stats if work is None else work.network  # that of `work` has the models of its conditions
        return host.plan_inputs(request, network=network, work=work, guided=guided, batch_coupled=batch_coupled)

    def check_patches(
        self, request: ParallelRequest, latent_shape: tuple[int, ...], text: int, steps: int | None = None
    ) -> None:
        """Raises Refused for a latent or a run that cannot be sampled in patches."""
        if self.architecture is not None:
            main = self.tokens(latent_shape, text).get(self.architecture.plan.main_stream, 0)
            request_checks.check_run_in_patches(request, main, steps)

    def tokens(self, latent_shape: tuple[int, ...], text: int) -> dict[str, int]:
        """Returns the tokens of each stream, for a latent [B, C, (T,) H, W] and a prompt of `text` tokens."""
        return self.architecture.tokens(self.network, latent_shape, text) if self.architecture else {}

    def work(self, latent_shape: tuple[int, ...], text: int, *, prompts: int = 1, cached: bool = False) -> Work:
        tokens = sum(self.tokens(latent_shape, text).values())
        recorded = self.recorded and not cached
        work = self.stats.work(latent_shape[0], tokens, prompts=prompts, cached=cached, recorded=recorded)
        if not isinstance(self.architecture, row_plan.RowArchitecture):
            return work
        return replace(work, row_ranks=self.architecture.row_ranks(self.network, latent_shape))


def describe_model(model: ModelPatcher, request: ParallelRequest) -> DescribedModel:
    """Describes a MODEL. Raises Refused where no worker can have its network."""
    dtype = request.dtype
    model_patches.check_network_patches(model)
    cast = model.object_patches.get("manual_cast_dtype")
    requested_dtype = dtype if dtype != "auto" else "" if cast is None else str(cast).removeprefix("torch.")
    spec = model_source.model_spec(model)
    network = model_patches.native_network(model)
    attributes, code = _compared(model, spec)
    undivided_by = [*(layers_of_packs(network) if spec.weights_fingerprint else ()), *code.inside[:1]]
    runtime.first_seen[network] = spec.files
    architecture = architecture_of(network)
    options = model.model_options["transformer_options"]
    by_rows, overridden = isinstance(architecture, row_plan.RowArchitecture), model_patches.OVERRIDE in options
    undivided_by += [] if by_rows else block_patches.see_all_tokens(options.get("patches", {}))
    undivided_by += network_modules.padding_modes(network) if attributes else []
    if overridden and not block_patches.attends_each_head(options[model_patches.OVERRIDE]):
        undivided_by.append(f"the attention {qualified_name(options[model_patches.OVERRIDE])}")
    methods = model_patches.replaced_methods(model)
    whole = [name for name, method in methods.items() if not block_patches.sees_each_token(method)]
    undivided_by += whole[:1]  # a chain of many would say no more
    compiled = model_patches.compilation(model, request.compile)
    if by_rows and compiled is not None:
        undivided_by.append("torch.compile")
    comfyui_dtype = cast or model.model.get_dtype_inference()
    batch_coupled = bool(methods) or code.couples or model_patches.is_batch_coupled(model, model.model_options)
    patch_models = dict.fromkeys(patch.model for patch in model.model_patches_models())
    weight_bytes = sum(map(model_management.module_size, [network, *patch_models]))
    item_bytes = (comfyui_dtype if dtype == "auto" else getattr(torch, dtype)).itemsize
    stats = network_stats_of(network, architecture, weight_bytes, item_bytes)
    stats = replace(stats, no_lse=stats.no_lse or model_patches.without_lse(model, request))
    patches_describer = describer()
    graphs = request.options.cuda_graphs != "off" and model_management.get_torch_device().type == accelerators.CUDA.kind
    described = DescribedModel(
        spec=replace(
            spec,
            attributes=attributes,
            compute_dtype=requested_dtype,
            force_cast=model.force_cast_weights,
            patches_fingerprint=str(model.patches_uuid) if model.patches else "",
            compilation=compiled,
        ),
        weight_patches=describe_weight_patches(model, patches_describer),
        packs=list(patches_describer.packs),
        code=patches_describer.code,
        code_for_good=code,
        runs_changed_code=bool(methods or code.inside),
        network=network,
        architecture=architecture,
        batch_coupled=batch_coupled,
        recorded=graphs and not (batch_coupled or stats.images_coupled or overridden),
        stats=stats,
    )
    return described.undivided(", ".join(undivided_by)) if undivided_by else described


def _compared(model: ModelPatcher, spec: specs.ModelSpec) -> tuple[str, CodeForGood]:
    """Returns what MODEL's network has, and what its file or node gives has not: plain attributes, in JSON, and code of
    packs. Raises Refused for all else that differs."""
    network = model_patches.native_network(model)
    by_node = bool(spec.weights_fingerprint)  # workers have the pack's layers too
    check_model(model, network, of_pack=by_node)
    attributes = spec.attributes
    if not by_node:
        attributes = network_parts.changed_attributes(model, spec.title, partial(model_source.load_again, model))
    code = CodeForGood(replaced_on(model), network_parts.code_in_place(model))
    if not by_node:
        known = [*(one.code for one in code.replaced), *code.in_place.values()]
        layers = [(name, kind) for name, kind in foreign_layers(network) if not any(kind is one for one in known)]
        check_none(layers)
    return attributes, code


def describe_weight_patches(model: ModelPatcher, patches_describer: object_codec.Describer) -> jobs.Described:
    """Describes weight patches (LoRA, merged models, adapters) by weight. Raises Refused for what cannot be sent."""
    described: dict[str, Any] = {}
    try:
        for key, patches in model.patches.items():
            described[key] = patches_describer.describe(list(patches), f"the LoRA or merge on {key}")
    except Unsendable as unsendable:
        raise Refused("model.weights", reason=unsendable.sentence) from None
    check_size(list(patches_describer.tensors.values()))
    return patches_describer.described(described)


def network_stats_of(
    network: nn.Module, architecture: Architecture | None, weight_bytes: int, item_bytes: int
) -> NetworkStats:
    stats = NetworkStats(
        name=type(network).__name__, divisible=False, step_cacheable=False, heads=1,
        weights=sum(parameter.numel() for parameter in network.parameters()),
        weight_bytes=weight_bytes, item_bytes=item_bytes, images_coupled=model_patches.network_couples_images(network),
    )  # fmt: skip
    if architecture is None:
        return stats
    plan, size = architecture.plan, model_management.module_size
    return replace(
        stats,
        name=architecture.name,
        divisible=True,
        step_cacheable=bool(plan.trunk),
        no_lse=plan.ulysses_only and f"{plan.ulysses_only} of {architecture.name}",
        heads=architecture.heads(network),
        layers=architecture.layers(network),
        width=architecture.width(network),
        blocks=tuple(map(size, network_modules.blocks_of(network, plan))),
        loads=tuple(
            network_modules.Load(sum(size(ref.block) for ref in unit), len(unit))
            for unit in network_modules.units_of(network, plan)
        ),
        why_not_in_patches=network_modules.why_not_in_patches(plan),
        row_levels=architecture.row_levels(network) if isinstance(architecture, row_plan.RowArchitecture) else (),
    )


def uses_network(sampler: samplers.Sampler) -> bool:
    """Does the code of a SAMPLER use more of the network than its evaluation?"""
    code = getattr(unwrap_sampler(sampler), "__code__", None)
    return code is not None and _names(code, "diffusion_model")


def unwrap_sampler(sampler: samplers.Sampler) -> Any:
    return inspect.unwrap(getattr(sampler, "sampler_function", sampler.sample))


def _names(code: CodeType, name: str) -> bool:
    """Is this the name of an attribute or global, or a string, in a function's code or its inner functions?"""
    inner = (part for part in code.co_consts if isinstance(part, CodeType))
    return name in code.co_names or name in code.co_consts or any(_names(part, name) for part in inner)
