"""ComfyUI's MODEL, guider and sampler in words that a worker understands. What has no words raises Unsendable."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import comfy.model_management
import comfy.samplers
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from torch import Tensor, nn

from ..parallel_runtime.accelerators import CUDA
from ..parallel_runtime.blocks import blocks_of, own_attentions
from ..parallel_runtime.host.cost import Figures, Work
from ..parallel_runtime.host.pipelines import check_run_in_patches, check_stages
from ..parallel_runtime.host.planning import Wish, check_step_cache
from ..parallel_runtime.inside_blocks import see_all_tokens
from ..parallel_runtime.jobs import SamplingJob
from ..parallel_runtime.loads import Load
from ..parallel_runtime.networks import Network, network_of
from ..parallel_runtime.plan import Plan
from ..parallel_runtime.specs import ModelSpec, ParallelRequest
from ..parallel_runtime.stages import units_of, why_not_in_patches
from .code import LOCAL, PLAIN, Unsendable, describe, reference, title
from .compiling import compilation
from .encoded import side_of
from .origin import origin
from .patches import (
    OVERRIDE,
    attributes_of,
    check_inside,
    describe_functions,
    describe_options,
    describe_weights,
)
from .refusals import check_guider, check_latent, function_of, reaches_in
from .stand_in import network_behind
from .tampering import check_network
from .workers import wish_here

OBJECTS = {"model_sampling", "manual_cast_dtype"}  # that a MODEL may have replaced and workers can have


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """A MODEL for the workers: what they load, the weight patches on it, and the network, for what planning asks."""

    spec: ModelSpec
    weights: dict[str, list[Any]]
    network: nn.Module
    plan: Network | None
    figures: Figures
    together: bool  # something on MODEL sees every prompt and image at once: they cannot be shared out
    ringless: bool  # something on MODEL replaces the attention, and gives no log-sum-exp
    recorded: bool = False  # where the host would lead, its evaluations are replayed

    def undivided(self, by: str) -> Source:
        """As it runs with what needs all tokens inside of blocks: as a network that no plan knows."""
        return replace(self, plan=None, figures=self.figures.whole(f"{type(self.network).__name__} with {by}"))

    def sampled_by(self, sampler: comfy.samplers.Sampler) -> Source:
        """As it runs under a SAMPLER: whole, prompts and images together, where that keeps state of the network's."""
        if not reaches_in(sampler):
            return self
        return replace(self.undivided(function_of(sampler).__name__), together=True)

    def wish(self, request: ParallelRequest, *, guided: bool = False, together: bool = False) -> Wish:
        """What a run of it asks of this host. Raises Refused for a step cache or stages that there cannot be."""
        check_step_cache(request, self.figures)
        check_stages(request, self.figures)
        whole, heads = "" if self.figures.divisible else self.figures.name, self.figures.heads
        return wish_here(request, heads=heads, guided=guided, together=together, ringless=self.ringless, whole=whole)

    def check_patches(
        self, request: ParallelRequest, latent_shape: tuple[int, ...], text: int, steps: int | None = None
    ) -> None:
        """Raises Refused for a latent or a run that cannot be sampled in patches."""
        if self.plan is not None:
            main = self.tokens(latent_shape, text).get(self.plan.plan.main, 0)
            check_run_in_patches(request, main, steps)

    def tokens(self, latent_shape: tuple[int, ...], text: int) -> dict[str, int]:
        """Of each stream, for a latent [B, C, (T,) H, W] and a prompt of `text` tokens."""
        return self.plan.tokens(self.network, latent_shape, text) if self.plan else {}

    def work(self, latent_shape: tuple[int, ...], text: int, *, prompts: int = 1, cached: bool = False) -> Work:
        tokens = sum(self.tokens(latent_shape, text).values())
        recorded = self.recorded and not cached
        return self.figures.work(latent_shape[0], tokens, prompts=prompts, cached=cached, recorded=recorded)


def describe_model(model: ModelPatcher, request: ParallelRequest) -> Source:
    """Raises Refused for a MODEL whose network no worker could have."""
    dtype = request.dtype
    check_inside(model)
    cast = model.object_patches.get("manual_cast_dtype")
    computed = dtype if dtype != "auto" else "" if cast is None else str(cast).removeprefix("torch.")
    spec = origin(model)
    network = network_behind(model)
    check_network(network)
    plan = network_of(network)
    options = model.model_options["transformer_options"]
    whole_only, replaced = see_all_tokens(options.get("patches", {})), OVERRIDE in options
    if not replaced and request.attention_backend == "auto":
        whole_only += [f"{function} in {module}" for function, module in own_attentions(network).items()]
    dtype_here = cast or model.model.get_dtype_inference()
    together = keeps_together(model, model.model_options)
    beside = dict.fromkeys(patch.model for patch in model.model_patches_models())  # which patches bring along
    graphs = request.cuda_graphs != "off" and comfy.model_management.get_torch_device().type == CUDA.kind
    source = Source(
        spec=replace(
            spec,
            compute_dtype=computed,
            patches=str(model.patches_uuid) if model.patches else "",
            compilation=compilation(model, request.compile),
        ),
        weights=describe_weights(model),
        network=network,
        plan=plan,
        ringless=replaced,
        together=together,
        recorded=graphs and not (together or replaced),
        figures=Figures(
            name=plan.name if plan else type(network).__name__,
            divisible=plan is not None,
            skippable=plan is not None and bool(plan.plan.trunk),
            heads=plan.heads(network) if plan else 1,
            layers=plan.layers(network) if plan else 0,
            width=plan.width(network) if plan else 0,
            weights=sum(parameter.numel() for parameter in network.parameters()),
            weight_bytes=sum(map(comfy.model_management.module_size, [network, *beside])),
            blocks=tuple(map(comfy.model_management.module_size, blocks_of(network, plan.plan))) if plan else (),
            loads=_loads(network, plan.plan) if plan else (),
            unpatched=why_not_in_patches(plan.plan) if plan else "",
            item_bytes=(dtype_here if dtype == "auto" else getattr(torch, dtype)).itemsize,
        ),
    )
    return source.undivided(", ".join(whole_only)) if whole_only else source


def _loads(network: nn.Module, plan: Plan) -> tuple[Load, ...]:
    size = comfy.model_management.module_size
    return tuple(Load(sum(size(seat.block) for seat in unit), len(unit)) for unit in units_of(network, plan))


def keeps_together(model: ModelPatcher, options: dict[str, Any]) -> bool:
    """Whether prompts and images are shared out to nobody, where `model` runs with these model options: a wrapper
    around the network (EasyCache) may watch one prompt to decide on all."""
    around = bool(model.get_all_wrappers(WrappersMP.DIFFUSION_MODEL))
    return around or seen_together(network_behind(model), options.get("transformer_options", {}))


def seen_together(network: nn.Module, options: dict[str, Any]) -> bool:
    """Whether `network`, or a patch inside of it (NAG), goes by all prompts and images of its batch."""
    known = network_of(network)
    return any(options.get("patches", {}).values()) or (known is not None and known.together)


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
    """One call of `guider.outer_sample`, ready to be sent. Raises Refused for a latent that fits no model of its kind,
    Unsendable where the loop has to stay here."""
    several = latent_shapes is not None and len(latent_shapes) > 1
    if not several:
        check_latent(guider.model_patcher, noise)
    kind, attributes = check_guider(guider)
    model = guider.model_patcher
    _check_sendable(model)
    shape = latent_shapes[0] if latent_shapes else noise.shape
    return SamplingJob(
        guider=kind,
        guider_attributes=attributes,
        conds=_conds(guider.conds),
        sampler=describe(sampler, "the SAMPLER"),
        noise=noise,
        latent=latent,
        mask=mask,
        sigmas=sigmas,
        seed=seed,
        random_seed=torch.initial_seed(),
        random_state=torch.get_rng_state(),
        model_sampling=_sampling(model.get_model_object("model_sampling")),
        attributes=attributes_of(model),
        model_options=describe_options(guider.model_options, side_of(source.network, shape)),
        wrappers=describe_functions(model.wrappers, "wrapper"),
        callbacks=describe_functions(model.callbacks, "callback"),
        patches=source.weights,
        together=source.together or keeps_together(model, guider.model_options),
        latent_shapes=[list(shape) for shape in latent_shapes or ()] if several else None,
    )


def _check_sendable(model: ModelPatcher) -> None:
    for name in model.object_patches.keys() - OBJECTS - attributes_of(model).keys():
        raise Unsendable(f"the MODEL has a replaced {name}")
    for name, models in model.additional_models.items():
        if models:
            raise Unsendable(f"the MODEL brings additional models ({name})")


def _conds(conds: dict[str, list[dict[str, Any]]]) -> Any:
    """Converted conditions without what ComfyUI makes anew from the rest."""
    made_anew = ("uuid", "model_conds")
    sendable = {
        name: [{key: value for key, value in cond.items() if key not in made_anew} for cond in of_one]
        for name, of_one in conds.items()
    }
    return describe(sendable, "the CONDITIONING")


def _sampling(sampling: torch.nn.Module) -> dict[str, Any]:
    kind = type(sampling)  # made inside a function, of ComfyUI's bases; or one of ComfyUI's own
    bases = kind.__bases__ if LOCAL in kind.__qualname__ else (kind,)
    if kind not in bases and any(callable(own) for own in vars(kind).values()):
        raise Unsendable(f"the model sampling {title(kind)} has code of its own, which the workers cannot have")
    attributes = {k: v for k, v in vars(sampling).items() if not k.startswith("_") and k != "training"}
    for name, value in attributes.items():
        if not _is_plain(value):
            raise Unsendable(f"the model's sampling has {name} = {value!r}, which cannot be sent to the workers")
    return {
        "bases": [reference(base, "the model sampling") for base in bases],
        "attributes": attributes,
        "buffers": dict(sampling.named_buffers()),
    }


def _is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, list | tuple) and all(map(_is_plain, value)))
