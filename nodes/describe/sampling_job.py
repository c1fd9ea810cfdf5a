"""Describes one run of a guider and sampler for the workers, and refuses what nobody could run."""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import comfy.samplers
from comfy.hooks import EnumHookType
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, WrappersMP
from torch import Tensor, nn

from ...parallel_runtime.architectures.split_plan import SplitLike
from ...parallel_runtime.errors import Refused
from ...parallel_runtime.group.worker_group import check_size
from ...parallel_runtime.jobs import TWO_MODEL_GUIDERS, SamplingJob
from ...parallel_runtime.loading import code_names, pack_states, random_states, replaced_code
from ...parallel_runtime.loading.code_names import Unsendable, is_of_a_pack, packs_named, qualified_name, reference
from ...parallel_runtime.loading.object_codec import Describer, rebuild
from .foreign_code import changes_itself, check_loop, couples_evaluations
from .model import DescribedModel
from .model_files import Conds, describer, gligens_of
from .model_patches import (
    couples_by_masks,
    describe_functions,
    describe_options,
    is_batch_coupled,
    without_compiled,
    wrappers_of,
)

TakeBack = Callable[[dict[str, Any]], None]
LATENT_DIMS = {1: ("length",), 2: ("height", "width"), 3: ("frames", "height", "width")}  # by a latent's dimensions
MULTIGPU = "multigpu"  # ComfyUI's name for a MODEL's clones on other GPUs, whose work the workers do
FULL_RUN_OPTIONS = {"step_cache": 0, "patches": 1}  # options that need the loop in the workers, with their off value
GUIDER_STATE = {
    "model_patcher", "model_options", "original_conds", "conds", "inner_model", "loaded_models",
    "uncond_inner", "uncond_loaded", "_uncond_neg", "_uncond_conds",  # of the second MODEL
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class OuterSample:
    """The arguments of a guider's `outer_sample`, in order; `latent_shapes` are of latents packed into one."""

    noise: Tensor
    latent_image: Tensor
    sampler: comfy.samplers.Sampler
    sigmas: Tensor
    denoise_mask: Tensor | None = None
    callback: Callable[[int, Any, Any, int], None] | None = None
    disable_pbar: bool = False
    seed: int | None = None
    latent_shapes: list | None = None

    @property
    def first_shape(self) -> tuple[int, ...]:
        """The shape [B, C, (T,) H, W] of the first latent."""
        return tuple(self.latent_shapes[0] if self.latent_shapes else self.noise.shape)


def describe_job(
    guider: comfy.samplers.CFGGuider, described: DescribedModel, call: OuterSample
) -> tuple[SamplingJob, TakeBack, Describer]:
    """Describes one call of `guider.outer_sample`; also returns what gives packs' objects here what a run has left in
    those of the workers, and what has described it. Raises Refused for a latent that the MODEL cannot take, Unsendable
    where the loop has to stay in ComfyUI's process."""
    several = len(call.latent_shapes or ()) > 1
    if not several:
        check_latent(guider.model_patcher, call.noise)
    kind, attributes = check_guider(guider)
    model, options = guider.model_patcher, guider.model_options
    network, mask, parts = described.network, call.denoise_mask, describer(model)
    merged, patchers = [described], {model: options}
    if (partner := partner_of(guider)) is not None and described.partner is not None:
        merged.append(described.partner)
        patchers[partner] = partner.model_options
    replaced = [*replaced_code.replaced_in_loop(), *(code for one in merged for code in one.code_for_good.replaced)]
    check_loop(replaced)
    models = [describe_on_model(*each, parts, one) for each, one in zip(patchers.items(), merged, strict=True)]
    sent = {
        "models": models,
        "conds": describe_conds(guider.conds, parts),
        "guider_attributes": parts.describe(attributes, "the GUIDER", of_pack=is_of_a_pack(type(guider))),
        "sampler": parts.describe(call.sampler, "the SAMPLER"),
    }
    code = [*parts.code, guider, *(code for one in merged for code in one.code), *(one.code for one in replaced)]
    variables, states, packs = _describe_variables(code, parts)
    packs = [*parts.packs, *packs_named(kind), *packs, *(pack for one in (*merged, *replaced) for pack in one.packs)]
    packs = code_names.in_import_order(dict.fromkeys(packs))
    code_names.check_usable(packs)
    coupled = described.batch_coupled or parts.names_network or any(map(couples_evaluations, replaced))
    job = SamplingJob(
        guider=kind,
        described=parts.described({**sent, **variables}),
        packs=packs,
        replaced={one.name: [one.fingerprint, *one.packs] for one in replaced},
        states=states,
        noise=call.noise,
        latent=call.latent_image,
        mask=mask,
        sigmas=call.sigmas,
        seed=call.seed,
        random_states=random_states.random_states(model.load_device),
        generator_kind=random_states.generator_kind(model.load_device),
        weight_patches=[one.weight_patches for one in merged],
        batch_coupled=coupled or is_batch_coupled(model, options) or couples_by_masks(network, mask),
        runs_changed_code=described.runs_changed_code,
        images_coupled=described.stats.images_coupled or bool(gligens_of(guider.conds)),
        latent_shapes=[list(shape) for shape in call.latent_shapes or ()] if several else None,
        pack_files=code_names.files_of(packs),
    )

    def take_back(result: dict[str, Any]) -> None:
        parts.take_back(result["changes"])
        vars(guider).update(attributes)
        pack_states.set_variables(rebuild(result["globals"]), in_place=True)

    return job, take_back, parts


def _describe_variables(code: list[Any], parts: Describer) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Describes the variables of packs that their code reads; also returns the states of those that are not sent, and
    the packs. Raises Unsendable."""
    found = [*pack_states.reached(code)]
    plain, objects = pack_states.read_by(found)
    sent: dict[str, Any] = {"globals": parts.describe(plain, "the packs' global variables")}
    others = objects.keys() & pack_states.unequal
    sent["objects"] = [[name, parts.describe(objects[name], pack_states.short(name), of_pack=True)] for name in others]
    states = {name: pack_states.state(value) for name, value in objects.items() if name not in pack_states.unequal}
    homes = (code_names.pack_reference(code_names.home_of(one)) or "" for one in found)
    return sent, states, [pack for name in (*homes, *plain, *objects) for pack in packs_named(name)]


def check_latent(model: ModelPatcher, latent: Tensor) -> None:
    """Raises Refused, with the shape and the right one, for a latent that MODEL cannot take."""
    form = model.get_model_object("latent_format")
    dims = ("batch", "channels", *LATENT_DIMS[form.latent_dimensions])
    if latent.ndim != len(dims) or latent.shape[1] != form.latent_channels or not latent.numel():
        shape, channels = str(tuple(latent.shape)), form.latent_channels
        raise Refused("latent.shape", shape=shape, dims=", ".join(dims), channels=channels)


def check_guider(guider: comfy.samplers.CFGGuider) -> tuple[str, dict[str, Any]]:
    """Returns the guider's class and attributes. Raises Unsendable for a class that workers cannot have."""
    kind = reference(type(guider), "the GUIDER")
    state = {*GUIDER_STATE, TWO_MODEL_GUIDERS.get(kind)}
    return kind, {name: value for name, value in vars(guider).items() if name not in state}


def partner_of(guider: comfy.samplers.CFGGuider) -> ModelPatcher | None:
    """Returns the MODEL that the guider evaluates the negative prompt with, None where it is the guider's only one.
    Raises Unsendable for two MODELs of one network, of which ComfyUI loads one at a time."""
    model = guider.model_patcher
    other = getattr(guider, TWO_MODEL_GUIDERS.get(reference(type(guider), "the GUIDER"), ""), model)
    if other is model or math.isclose(guider.cfg, 1.0):
        return None
    if other.model is not model.model:
        return other
    if other.patches_uuid != model.patches_uuid or other.object_patches != model.object_patches:
        raise unsendable_partner(guider)
    return None


def unsendable_partner(guider: comfy.samplers.CFGGuider) -> Unsendable:
    """Says that the second MODEL of a guider keeps the loop in ComfyUI's process."""
    name = TWO_MODEL_GUIDERS[reference(type(guider), "the GUIDER")]
    thing = qualified_name(getattr(guider, name))
    return Unsendable("unsendable.guider", guider=qualified_name(guider), name=name, thing=thing)


def describe_on_model(
    model: ModelPatcher, options: dict[str, Any], describer: Describer, described: DescribedModel
) -> list[Any]:
    """Describes a MODEL's object patches, what nodes have put onto its network, model options, wrappers and callbacks.
    Raises Unsendable."""
    if "registered_hooks" in options and options["registered_hooks"].get_type(EnumHookType.TransformerOptions):
        raise Unsendable("unsendable.hook")
    for callback in model.get_all_callbacks(CallbacksMP.ON_REGISTER_ALL_HOOK_PATCHES):
        raise Unsendable("unsendable.registers", name=qualified_name(callback))  # a worker would call it once more
    for hook in getattr(options.get("registered_hooks"), "hooks", ()):
        if changes_itself(register := type(hook).add_hook_patches):
            raise Unsendable("unsendable.registers", name=qualified_name(register))
    for name, models in model.additional_models.items():
        if models and name != MULTIGPU:
            raise Unsendable("unsendable.models", name=name)
    # ComfyUI detaches this process's clones of a MODEL, whose objects have what the run has left, as they go.
    left_out = (CallbacksMP.ON_DETACH, CallbacksMP.ON_CLONE)
    callbacks = {kind: groups for kind, groups in model.callbacks.items() if kind not in left_out}
    in_place = described.code_for_good.in_place
    added = (part for part in in_place.values() if isinstance(part, nn.Module))
    for module in (module for part in added for module in part.modules()):
        describer.network_paths.pop(id(module), None)
    objects = {"model_sampling": model.get_model_object("model_sampling"), **in_place, **without_compiled(model)}
    objects.pop("manual_cast_dtype", None)  # DescribedModel has it
    sent = [
        describer.describe(objects, "the MODEL"),
        describe_options(options, describer),
        describe_functions(options["transformer_options"].get("wrappers", {}), "wrapper", describer),
        describe_functions(callbacks, "callback", describer),
    ]
    with suppress(Unsendable):  # ComfyUI clones no MODEL in a run, so that a worker can do without
        on_clone = {kind: groups for kind, groups in model.callbacks.items() if kind == CallbacksMP.ON_CLONE}
        sent[-1] += describe_functions(on_clone, "callback", describer)
    return sent


def describe_conds(conds: Conds, describer: Describer) -> Any:
    """Describes converted conditions, without the `uuid` that ComfyUI makes anew. Raises Unsendable."""
    sendable = {
        name: [{key: value for key, value in cond.items() if key != "uuid"} for cond in prompt]
        for name, prompt in conds.items()
    }
    described = describer.describe(sendable, "the CONDITIONING")
    check_size(list(describer.tensors.values()))
    return described


def check_conds(described: DescribedModel, conds: Conds) -> None:
    """Raises Refused for a prompt that another text encoder than the network's has made, or that has no tokens."""
    architecture, network = described.architecture, described.network
    if architecture is None:
        return
    text, pooled = architecture.text_width(network), architecture.pooled_width(network)
    for name, cond in ((name, cond) for name, prompt in conds.items() for cond in prompt):
        tokens, vector = cond.get("cross_attn"), cond.get("pooled_output")
        if tokens is not None and text is not None and tokens.shape[-1] != text:
            raise Refused("conds.width", prompt=name, width=tokens.shape[-1], network=architecture.name, wanted=text)
        if vector is not None and pooled is not None and vector.shape[-1] < pooled:
            raise Refused("conds.pooled", prompt=name, width=vector.shape[-1], network=architecture.name, wanted=pooled)
        if tokens is not None and not tokens.shape[1] and "text" in architecture.tokens(network, (1, 1, 1, 1), 0):
            raise Refused("conds.empty", prompt=name, network=architecture.name)


def text_tokens(conds: Conds) -> int:
    """Returns the text tokens of the longest of these prompts."""
    texts = [cond["cross_attn"] for prompt in conds.values() for cond in prompt if "cross_attn" in cond]
    return max((text.shape[1] for text in texts), default=0)


def check_token_patches(guider: comfy.samplers.CFGGuider, described: DescribedModel, patches: int) -> None:
    """Raises Refused where something on the guider's MODEL, or in its model options or prompts, needs all tokens of an
    evaluation at once; also for a prompt's mask that would be split like its tokens."""
    options = guider.model_options
    inside = options.get("transformer_options", {})
    kinds = [kind for kind, functions in inside.get("patches", {}).items() if functions]
    wrappers = wrappers_of(guider.model_patcher, options, WrappersMP.DIFFUSION_MODEL)
    present = {
        f"model patches ({', '.join(kinds)})": kinds,
        "replaced blocks": inside.get("patches_replace", {}).get("dit"),
        "a wrapper around the network, such as a step cache": wrappers,
        "context windows": options.get("context_handler"),
        "torch.compile": described.spec.compilation,
    }
    if named := [name for name, value in present.items() if value]:
        raise Refused("patches.model", widget="patches", patches=patches, things="; ".join(named))
    plans = described.architecture.plan.module_plans if described.architecture else ()
    args = [arg for module in plans for arg in module.args.items()]
    if any("mask" in str(name) and isinstance(spec, SplitLike) for name, spec in args):
        for name, prompt in guider.conds.items():
            if any(cond.get("attention_mask") is not None for cond in prompt):
                raise Refused("conds.mask", widget="patches", prompt=name, patches=patches)
