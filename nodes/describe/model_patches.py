"""Describes what is on a MODEL for the workers: model options, wrappers, block patches, torch.compile.

Model patches' pictures and videos are encoded before a run, because workers have no VAE to do it during one: the patch
itself is called, with blocks that do nothing, so that its own code scales and encodes.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any

import comfy.sd
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import get_all_wrappers
from comfy_api.torch_helpers.torch_compile import COMPILE_KEY, TORCH_COMPILE_KWARGS
from torch import Tensor, nn

from ...parallel_runtime.architectures import architecture_of
from ...parallel_runtime.errors import Refused, quoted
from ...parallel_runtime.jobs import Described
from ...parallel_runtime.loading.code_names import Unsendable, is_comfyui, qualified_name
from ...parallel_runtime.loading.model_kinds import Encoded
from ...parallel_runtime.loading.object_codec import PLAIN, Describer
from ...parallel_runtime.request import CompileChoice
from ...parallel_runtime.specs import Compilation
from .describer import describer

# ComfyUI's sampling code makes these model options anew in the worker.
SET_BY_RUN = {"registered_hooks", "to_load_options", "multigpu_clones", "multigpu_thread_pool", TORCH_COMPILE_KWARGS}
AROUND_NETWORK = {"wrappers", "callbacks"}  # transformer_options that are around the network, not in it
OVERRIDE = "optimized_attention_override"
IN_BLOCKS = ("patches", "patches_replace", OVERRIDE)
WRAPPER_KEY = "context_parallel"
CALLED_CALLBACKS = {  # that ComfyUI calls on a MODEL without weights too, or only for what is refused or left out
    "on_clone", "on_detach_after", "on_pre_run", "on_cleanup", "on_prepare_state", "on_apply_hooks",
    "on_register_all_hook_patches", "on_inject_model", "on_eject_model", "on_deepclone_multigpu",
    "on_match_multigpu_clones",
}  # fmt: skip
PAST_ALL_BLOCKS = 1 << 20
ENCODING_BLOCK = {  # the block before which a patch encodes its picture or video in the latent's size
    "comfy_extras.nodes_model_patch.DiffSynthCnetPatch": PAST_ALL_BLOCKS,
    "comfy_extras.nodes_model_patch.ZImageControlPatch": PAST_ALL_BLOCKS,
    "comfy_extras.nodes_model_patch.WanUni3CCnetPatch": 0,
}
RESULT_ATTRIBUTES = ("encoded_image", "prepared_render")  # patches keep the encoded result in these attributes
VIDEO_ATTRIBUTE = "render_video"  # the attribute with pixels, hundreds of megabytes
LatentSize = tuple[int, ...]


def latent_size(network: nn.Module, latent: Sequence[int]) -> LatentSize:
    """Returns a latent's [T,] H, W or L, padded as in the network, where patches see them."""
    sides, plan = tuple(latent[2:]), architecture_of(network)
    patch = plan.padded(network) if plan else 1
    return *sides[:-2], *(-(-side // patch) * patch for side in sides[-2:])


def describe_options(options: dict[str, Any], size: LatentSize | None, describer: Describer) -> Any:
    """Describes a guider's model_options for a latent of this size; None encodes no pictures. Raises Unsendable."""
    inside = _pre_encode(options.get("transformer_options", {}), size)
    inside = {key: value for key, value in inside.items() if key not in AROUND_NETWORK}
    sent = {key: value for key, value in {**options, "transformer_options": inside}.items() if key not in SET_BY_RUN}
    return describer.describe({key: value for key, value in sent.items() if not _empty(value)}, "a model option")


def describe_functions(functions: dict[str, dict[Any, list[Any]]], what: str, describer: Describer) -> list[list[Any]]:
    """Describes each group of wrappers or callbacks, in their order: [kind, key, functions]. Raises Unsendable.

    Groups before our own wrapper are left out: ComfyUI calls them first, in its own process.
    """
    return [
        [kind, key, describer.describe(list(group), f"the {kind} {what}")]
        for kind, by_key in functions.items()
        for key, group in list(by_key.items())[list(by_key).index(WRAPPER_KEY) + 1 if WRAPPER_KEY in by_key else 0 :]
        if group and key != COMPILE_KEY  # the workers compile by the model options
    ]


def native_model(model: ModelPatcher) -> ModelPatcher:
    """Returns MODEL; of one without weights (remote/remote_model.py) the one that ComfyUI loaded."""
    native: ModelPatcher = vars(model.model.diffusion_model).get("native", model)
    return native


def native_network(model: ModelPatcher) -> nn.Module:
    """Returns MODEL's network; of one without weights the network that the workers have."""
    network: nn.Module = native_model(model).model.diffusion_model
    return network


def wrappers_of(model: ModelPatcher, options: dict[str, Any], kind: str) -> list[Any]:
    """Returns the wrappers of this kind on MODEL and in model options; ComfyUI copies MODEL's there as a run begins."""
    return [*get_all_wrappers(kind, options, is_model_options=True), *model.get_all_wrappers(kind)]


def describe_transformer_options(
    options: dict[str, Any], size: LatentSize | None, *, packs: bool = False, model: ModelPatcher | None = None
) -> Described:
    """Describes the transformer_options that a network's blocks read, for a latent of this size.

    Raises Refused for foreign code in the blocks: without `packs` for that of packs, whose objects may keep state from
    one evaluation to the next. Other foreign objects are left out: only foreign code reads them.
    """
    described, options_describer = {}, describer(model=model, packs=packs)
    for key, value in _pre_encode(options, size).items():
        if key in AROUND_NETWORK or _empty(value):
            continue
        try:
            described[key] = options_describer.describe(value, f"the transformer option {key}")
        except Unsendable as unsendable:
            if key in IN_BLOCKS:
                what = _with_function_names(key, value)
                raise Refused("model.blocks", what=what, reason=unsendable.sentence) from None
    return options_describer.described(described)


def compilation(model: ModelPatcher, chosen: CompileChoice) -> Compilation | None:
    """Returns how the workers compile: as ComfyUI's set_torch_compile_wrapper says on MODEL, else as chosen. Raises
    Refused for a backend or option that is code."""
    kwargs = model.model_options.get(TORCH_COMPILE_KWARGS)
    if kwargs is None:
        return Compilation() if chosen == "on" else None
    if not isinstance(kwargs["backend"], str):
        raise Refused("compile.backend", backend=quoted(kwargs["backend"]))
    plain = {name: value for name, value in (kwargs["options"] or {}).items() if not callable(value)}
    try:
        options = json.dumps(plain, sort_keys=True)
    except TypeError as error:
        raise Refused("compile.option", error=str(error)) from None
    return Compilation(
        backend=kwargs["backend"],
        mode=kwargs["mode"],
        fullgraph=bool(kwargs["fullgraph"]),
        dynamic=kwargs["dynamic"],
        options=options,
    )


def check_network_patches(model: ModelPatcher) -> None:
    """Raises Refused with all patches of MODEL inside the network that the workers cannot run."""
    names = ["weight wrappers"] if model.weight_wrapper_patches else []
    names += ["forced hooks"] if model.forced_hooks else []
    names += [f"the injection {name}" for name, injections in model.injections.items() if injections]
    for name, value in replaced_methods(model).items():
        try:
            describer(model=model).describe(value, f"the replaced {name}")
        except Unsendable as reason:
            names.append(f"a replaced {name}: {reason.sentence}")
    names += [
        f"the {kind} callback {qualified_name(callback)}"
        for kind, groups in model.callbacks.items()
        if kind not in CALLED_CALLBACKS
        for callback in chain.from_iterable(groups.values())
        if not is_comfyui(callback)
    ]
    if names:
        raise Refused("model.inside", things="; ".join(sorted(names)))
    options = model.model_options["transformer_options"]
    in_blocks = {key: options[key] for key in IN_BLOCKS if key in options}
    describe_transformer_options(in_blocks, None, packs=True, model=model)


def replaced_methods(model: ModelPatcher) -> dict[str, Any]:
    """Returns the functions and objects with which MODEL replaces parts of its network, by name."""
    names = [name for name in model.object_patches if name.startswith("diffusion_model")]
    return {name: model.object_patches[name] for name in names if name not in replaced_attributes(model)}


def replaced_attributes(model: ModelPatcher) -> dict[str, Any]:
    """Returns the plain values with which MODEL replaces attributes of its network, by name."""
    patches = ((name, value) for name, value in model.object_patches.items() if name.startswith("diffusion_model."))
    return {name: value for name, value in patches if isinstance(value, PLAIN)}


def _with_function_names(key: str, value: Any) -> str:
    """Returns the option's name with those of its functions, which tell the pack that they belong to."""
    if not isinstance(value, dict):
        return f"{key} ({qualified_name(value)})"
    functions = [function for on in value.values() for function in (on.values() if isinstance(on, dict) else on)]
    return f"{', '.join(sorted(value))} ({', '.join(sorted({qualified_name(function) for function in functions}))})"


def _empty(value: Any) -> bool:
    return value is None or (isinstance(value, dict | list | tuple | set) and not value)


def _pre_encode(options: dict[str, Any], size: LatentSize | None) -> dict[str, Any]:
    """Returns `options` (transformer_options) with patches whose pictures are encoded for a latent of this size, and
    that have no VAE. `size` None encodes nothing, for patches that will not run."""
    patches = options.get("patches") or {}
    each = {id(patch): patch for of_kind in patches.values() for patch in of_kind if _encodes(patch)}
    encoded = {key: _without_vae(patch, size) for key, patch in each.items()}
    kinds = {kind: [encoded.get(id(patch), patch) for patch in of_kind] for kind, of_kind in patches.items()}
    return {**options, "patches": kinds} if encoded else options


def _encodes(patch: Any) -> bool:
    return qualified_name(type(patch)) in ENCODING_BLOCK and isinstance(patch.vae, comfy.sd.VAE)


def _without_vae(patch: Any, size: LatentSize | None) -> Any:
    if size is not None:
        _encode(patch, size)
    made = copy.copy(patch)
    if hasattr(made, VIDEO_ATTRIBUTE):
        setattr(made, VIDEO_ATTRIBUTE, getattr(made, VIDEO_ATTRIBUTE)[:1])
    made.vae = Encoded(patch.vae.spacial_compression_encode())
    return made


def _encode(patch: Any, size: LatentSize) -> None:
    """Has the patch encode its pictures for a latent of this size and keep them, as in ComfyUI's own runs."""
    trial = copy.copy(patch)
    trial.model_patch = SimpleNamespace(model=_NoOpModel(patch.model_patch.model))
    nothing = torch.zeros(1, 1, 1)
    latent = torch.empty(1, 1, *size)
    block = ENCODING_BLOCK[qualified_name(type(patch))]
    trial({"x": latent, "img": nothing, "txt": nothing, "vec": nothing, "block_index": block})
    vars(patch).update({name: value for name, value in vars(trial).items() if name.startswith(RESULT_ATTRIBUTES)})


class _NoOpModel:
    """Replaces a patch's model, with blocks that compute nothing."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def control_block(self, *_: Any) -> Tensor:
        return torch.zeros(1, 1, 1)

    def process_input(self, *_: Any) -> tuple[None, None]:
        return None, None

    def forward_block(self, *_: Any) -> tuple[None, Tensor]:
        return None, torch.zeros(1, 1, 1)
