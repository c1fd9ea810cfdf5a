"""Describes what ComfyUI has loaded from files besides a MODEL's network, for loading/object_codec.py: ControlNets,
Control-LoRAs, T2I adapters, model patches, GLIGEN models and hypernetworks by their file; a VAE by its loader's call or
its weights. ComfyUI's loaders, which the workers call again, note the file that they read, also where nodes of packs
call them.

Says also why a VAE stays in ComfyUI's process, and explains a decode for CP Plan. CP VAE's network is divided, as some
classes allow. One that a ControlNet or model patch encodes its pictures with is whole on every worker: any class of
ComfyUI's."""

import functools
import json
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import folder_paths
import torch
from comfy import controlnet, sd
from comfy.controlnet import ControlBase, ControlLora, ControlNet, ControlNetSD35, QwenFunControlNet, T2IAdapter
from comfy.gligen import Gligen
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher
from comfy.sd import VAE
from torch.utils.weak import WeakIdKeyDictionary

from ...parallel_runtime.architectures.autoencoders import COMPARED, WHOLE, kind_of, name_of
from ...parallel_runtime.errors import Refused, say
from ...parallel_runtime.explain.plan_report import share_cores
from ...parallel_runtime.explain.plan_words import Decode, decode_line
from ...parallel_runtime.loading import object_codec, replaced_code
from ...parallel_runtime.loading.code_names import Unsendable, is_comfyui, module_named, qualified_name, reference
from ...parallel_runtime.loading.fingerprint import check_unchanged, model_fingerprint, stat_file
from ...parallel_runtime.planning.run_plan import DeviceProfile
from ...parallel_runtime.specs import ModelSpec, Placement, SourceFile
from .foreign_code import changes_of, check_code, foreign_layers

FOLDER = "model_patches"
_files: MutableMapping[Any, SourceFile] = WeakIdKeyDictionary()  # by what clones of a loaded model share
Conds = Mapping[str, list[dict[str, Any]]]  # a guider's conditions: for each name, such as positive, ComfyUI's dicts
METHODS = ("pre_run", "get_control", "control_merge", "copy", "cleanup")
# Modules of a ControlNet that give a residual each, or too little memory is planned for.
OUTPUTS = ("controlnet_blocks", "controlnet_single_blocks", "control_blocks")
CONTROL_CLASSES = (ControlNet, ControlNetSD35, QwenFunControlNet, ControlLora, T2IAdapter)
# Attributes that nodes and loaders set, each on all of these classes; others belong to a run or to the loaded file.
SETTINGS = (
    "strength", "timestep_percent_range", "extra_args", "extra_conds", "strength_type", "global_average_pooling",
    "compression_ratio", "upscale_algorithm", "concat_mask",
)  # fmt: skip
VAE_FIELDS = ("loader", "arguments", "weight_dtype", "kind", "weights_fingerprint")  # of a ModelSpec
ARGUMENT_BYTES = 64 << 10  # a message may be twice as long


class NotParallel(Exception):
    """Says why ComfyUI's own process, not the workers, runs a VAE, a CLIP or a call of it."""


def note_files() -> None:
    """Has ComfyUI's loaders note the file that they read for what they return."""
    patch_loader = module_named("comfy_extras.nodes_model_patch").ModelPatchLoader
    for owner, name, path_of in (
        (controlnet, "load_controlnet", lambda path, model=None, *_, **__: path if model is None else None),
        (sd, "load_gligen", lambda path: path),
        (module_named("comfy_extras.nodes_hypernetwork"), "load_hypernetwork_patch", lambda path, strength: path),
        (patch_loader, "load_model_patch", lambda _, name: folder_paths.get_full_path(FOLDER, name)),
    ):
        setattr(owner, name, _noting(getattr(owner, name), path_of))


def _noting(load: Callable[..., Any], path_of: Callable[..., str | None]) -> Callable[..., Any]:
    """Returns `load` noting its file, `path_of` its arguments; None for weights of more, as of a difference."""

    @functools.wraps(load)
    def noting(*args: Any, **kwargs: Any) -> Any:
        path = path_of(*args, **kwargs)
        file = None if path is None else stat_file(path)
        made = load(*args, **kwargs)
        if file is not None and made is not None:
            _files[_shared_part(made[0] if isinstance(made, tuple) else made)] = file
        return made

    return noting


def _shared_part(loaded: Any) -> Any:
    """Returns what all clones of a model have in common: its network, or the first of a Control-LoRA's weights."""
    match loaded:
        case ModelPatcher():
            return loaded.model
        case ControlLora():
            return next(iter(loaded.control_weights.values()))
        case T2IAdapter():
            return loaded.t2i_model
        case ControlBase():
            return loaded.control_model
    return loaded


def _source_file(loaded: Any) -> SourceFile:
    """Returns the file this was loaded from. Raises LookupError if that is unknown, Refused if it has changed."""
    file = _files.get(_shared_part(loaded))
    if file is None:
        raise LookupError("ComfyUI's loader has not read it from a file")
    check_unchanged(file)
    return file


def gligens_of(conds: Conds) -> list[ModelPatcher]:
    """Returns the GLIGEN models of these conditions, each once; they make a box for each image of a batch."""
    models = (cond["gligen"][1] for prompt in conds.values() for cond in prompt if cond.get("gligen"))
    return list(dict.fromkeys(models))


def network_of(control: ControlBase) -> torch.nn.Module | None:
    """Returns the ControlNet's network; None for a Control-LoRA, which makes one from its MODEL's as a run begins."""
    return None if isinstance(control, ControlLora) else _shared_part(control)


def weight_bytes(controls: Iterable[ControlBase]) -> int:
    """Returns the bytes of all their weights; weights that several share count once."""
    bytes_by_id: dict[int, int] = {}
    for control in controls:
        network = network_of(control)
        weights = control.control_weights.values() if network is None else network.parameters()
        bytes_by_id |= {id(weight): weight.nbytes for weight in weights}
    return sum(bytes_by_id.values())


def count_residuals(controls: Iterable[ControlBase], layers: int) -> int:
    """Counts the tensors of all tokens that ControlNets give to `layers`: residuals, and a chain's sums."""
    outputs = (getattr(network_of(control), name, ()) for control in controls for name in OUTPUTS)
    return sum(map(len, outputs)) + layers * sum(control.previous_controlnet is not None for control in controls)


def describer(model: ModelPatcher | None = None, *, packs: bool = True) -> object_codec.Describer:
    """Returns a Describer for a run of MODEL. Without `packs`, it takes no code of packs."""
    return object_codec.Describer(model, _describe_loaded, packs=packs)


def _describe_loaded(value: Any, to: object_codec.Parts) -> dict[str, Any]:
    """Describes what a file has given, its parts by `to`. Raises Unsendable for what workers cannot load, Refused where
    the file has changed."""
    if isinstance(value, ControlBase):
        return _describe_control(value, to)
    try:
        if isinstance(value, VAE):
            vae = getattr(value, "native", value)  # of a CP VAE
            _check_as_loaded(vae)
            spec = vae_spec(vae)
            if not spec.loader:  # ComfyUI tells these classes by their weights
                _check_compared(vae)
            to.describer.vaes.append(vae)
            file = {"kind": "vae", "path": spec.title, "spec": {name: asdict(spec)[name] for name in VAE_FIELDS}}
            return {"file": file, "weights": None if spec.loader else to(dict(vae.get_sd()))}
        if isinstance(value, ModelPatcher):
            return {"file": _patch_file(value), "network_alone": False}
        if isinstance(value, Gligen):
            return {"file": _gligen_file(value), "network_alone": True}
        file = {"kind": "hypernetwork", **asdict(_source_file(value)), "strength": value.strength}
        return {"file": file, "network_alone": True}
    except NotParallel as why:
        thing, reason = qualified_name(type(value)), why.args[0]
    except LookupError as why:
        thing, reason = qualified_name(type(value)), why
        if isinstance(value, ModelPatcher):
            thing += f" with a {qualified_name(type(value.model))}"
    raise Unsendable("unsendable.object.because", what=to.what, thing=thing, reason=reason)


def _patch_file(model: ModelPatcher) -> dict[str, Any]:
    """Describes a model of ModelPatchLoader: its SourceFile, and whether its weights are the file's, `assigned`, or
    copies in the dtype of its class; or a model of GLIGENLoader. Raises LookupError saying why workers cannot have it,
    Refused where the file has changed."""
    if isinstance(model.model, BaseModel):
        raise LookupError("it is a MODEL, not a model patch")
    if model.patches or model.object_patches or model.hook_patches:
        raise LookupError("it is patched itself")
    if isinstance(model.model, Gligen):
        return _gligen_file(model.model)
    return {"kind": "model_patch", **asdict(_source_file(model)), "assigned": model.is_dynamic()}


def _gligen_file(network: Gligen) -> dict[str, Any]:
    """Describes the network of GLIGENLoader: its SourceFile, and the dtype that it has in ComfyUI. Raises LookupError
    where its file is unknown, Refused where the file has changed, Unsendable where a pack has replaced its code."""
    check_code(replaced_code.GLIGEN)
    file = asdict(_source_file(network))
    return {"kind": "gligen", **file, "dtype": _dtype_name(next(network.parameters()).dtype)}


def _describe_control(control: ControlBase, to: object_codec.Parts) -> dict[str, Any]:
    if type(control) not in CONTROL_CLASSES:
        raise Unsendable("unsendable.object", what=to.what, thing=qualified_name(type(control)))
    # What a run calls on it and on its network: a pack may have replaced that.
    called = [getattr(control, name) for name in METHODS]
    called += [] if (network := network_of(control)) is None else [network.forward]
    patcher = getattr(control, "control_model_wrapped", None)
    patched = patcher is not None and (patcher.patches or patcher.object_patches or patcher.hook_patches)
    if patched or control.extra_hooks is not None or not all(map(is_comfyui, called)):
        raise Unsendable("unsendable.control.patched", what=to.what)
    try:
        file, dtypes = asdict(_source_file(control)), ("", "")
    except LookupError:
        raise Unsendable("unsendable.control.file", what=to.what) from None
    if isinstance(control, ControlNet) and not isinstance(control, ControlLora):
        dtypes = _dtype_name(control.control_model.dtype), _dtype_name(control.manual_cast_dtype)
    return {
        "file": {"kind": "control_net", **file, "dtype": dtypes[0], "computed": dtypes[1]},
        "settings": to({name: getattr(control, name) for name in SETTINGS}),
        "image": to(control.cond_hint_original.movedim(1, -1)),  # as it lies in memory
        "masks": to(list(control.extra_concat_orig)),
        "vae": to(control.vae),
        "previous": to(control.previous_controlnet),
    }


def _dtype_name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def vae_spec(vae: VAE) -> ModelSpec:
    """Returns what workers load for a VAE: the call of the function that made it, with arguments in JSON; or "" and
    metadata that its weights lack."""
    model, init = vae.first_stage_model, vae.patcher.cached_patcher_init
    metadata: dict[str, Any] = {"tae_latent_channels": vae.latent_channels}
    if isinstance(config := getattr(model, "config", None), dict):
        metadata["config"] = json.dumps({"vae": config})
    loader, arguments = "", json.dumps(metadata)
    if init is not None and len(init) == 2 and init[0].__module__ == VAE.__module__:
        with suppress(Refused, TypeError):  # a function without a name, or arguments that are not plain
            name, given = reference(init[0], "the loader"), json.dumps(init[1])
            if len(given) < ARGUMENT_BYTES:
                loader, arguments = name, given
    return ModelSpec(
        loader=loader,
        arguments=arguments,
        weight_dtype=_dtype_name(vae.vae_dtype),
        kind=kind_of(model),
        weights_fingerprint=model_fingerprint(model, vae.vae_dtype),
    )


def check_vae(vae: VAE) -> None:
    """Raises NotParallel for a VAE that the workers cannot divide."""
    if type(vae) is VAE:
        _check_compared(vae)
        if vae.latent_dim == 1 or vae.extra_1d_channel is not None:
            raise NotParallel(say("vae.sound"))
    _check_as_loaded(vae)


def _check_compared(vae: VAE) -> None:
    kind = kind_of(vae.first_stage_model)
    if kind not in COMPARED:
        why = WHOLE.get(name_of(vae.first_stage_model))
        raise NotParallel(say(why) if why else say("vae.unknown", kind=kind))


def _check_as_loaded(vae: VAE) -> None:
    """Raises NotParallel for a VAE that is not as ComfyUI's own loaders made it."""
    if type(vae) is not VAE:
        raise NotParallel(say("vae.foreign", kind=f"{type(vae).__module__}.{type(vae).__name__}"))
    if vae.patcher.patches or vae.patcher.object_patches:
        raise NotParallel(say("vae.patched"))
    for name, code in (*foreign_layers(vae.first_stage_model), *changes_of(vae.first_stage_model)):
        raise NotParallel(say("vae.code", what=name, code=replaced_code.name_in_pack(code)))


def encode_bytes(vae: VAE, latent: tuple[int, ...]) -> int:
    """Returns ComfyUI's estimate of the memory that encoding a picture for a latent [B, C, (T,) H, W] takes."""
    if vae.latent_dim == 1:  # sound
        return 0
    unit, frames = vae.spacial_compression_encode(), latent[2] if len(latent) == 5 else 1
    time = [vae.upscale_ratio[0](frames)] if vae.latent_dim == 3 else []
    sizes = (1, vae.output_channels, *time, latent[-2] * unit, latent[-1] * unit)
    return int(vae.memory_used_encode(sizes, vae.vae_dtype))


def explain_decode(
    vae: Any, latent: tuple[int, ...], placement: Placement, profile: DeviceProfile | None
) -> str | tuple[str, ...]:
    """Returns sentences on the decode of a latent [B, C, (T,) H, W]. `vae`: VAE Decode's, with or without CP VAE."""
    native = getattr(vae, "native", vae)
    native.throw_exception_if_invalid()
    try:
        check_vae(native)
    except NotParallel as reason:
        return say("decode.whole", reason=reason.args[0])
    if native.latent_dim == 2 and len(latent) == 5:  # as ComfyUI does: a video's first frame
        latent = (*latent[:2], *latent[3:])
    if len(latent) != native.latent_dim + 2:
        return say("decode.dims", wanted=native.latent_dim + 2, found=len(latent))
    kind, dtype = kind_of(native.first_stage_model), native.vae_dtype
    tiles = COMPARED[kind].tiles
    grid = tiles.grid(native.first_stage_model, "decode", latent) if tiles else None
    decode = Decode(
        kind=kind,
        latent=latent,
        weight_bytes=native.model_size(),
        activation_bytes=int(native.memory_used_decode(latent, dtype)),
        item_bytes=dtype.itemsize,
        grid=grid,
        tile_bytes=int(native.memory_used_decode((*latent[:2], *grid.tile), dtype)) if grid else 0,
    )
    return decode_line(decode, len(placement.devices), None if share_cores(placement) else profile)
