"""ComfyUI's MODEL, guider and sampler in words that a worker understands; what has no words is refused by name."""

from __future__ import annotations

import functools
import json
import os
import weakref
from dataclasses import dataclass
from typing import Any

import comfy.samplers
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from ..parallel_runtime.errors import Refused
from ..parallel_runtime.families import recognise
from ..parallel_runtime.families.base import Family, Shapes
from ..parallel_runtime.families.header import header
from ..parallel_runtime.specs import ComfyModel, DtypeChoice, ModelSpec, SamplingJob
from .code import LOCAL, describe, or_else, reference, title
from .origin import still_holds
from .patches import WAY_OUT, describe_options, describe_weights, describe_wrappers
from .refusals import SAMPLE_HERE, check_conds, check_guider, check_latent, check_model, check_sampler

LOADERS = ("load_diffusion_model", "load_checkpoint_guess_config")
HONOURED_LOADER_OPTIONS = {"dtype"}
WEIGHTLESS = "disable_unet_model_creation"  # how the model was built here says nothing of the file
_first_seen: weakref.WeakKeyDictionary[torch.nn.Module, tuple[int, int]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Patches:
    """What lies on a MODEL: weight patches by weight, functions for guidance, wrappers around the sampling code."""

    weights: dict[str, list[Any]]
    options: dict[str, Any]
    wrappers: list[list[Any]]


def describe_model(model: ModelPatcher, dtype: DtypeChoice) -> tuple[ModelSpec, Family, Patches]:
    """The file behind MODEL, what to compute in, the family that can run it, and what lies on it. Raises Refused."""
    check_model(model)
    spec, family, weights = describe_file(model, dtype)
    return spec, family, Patches(weights, describe_options(model), describe_wrappers(model))


def describe_file(model: ModelPatcher, dtype: DtypeChoice) -> tuple[ModelSpec, Family, dict[str, list[Any]]]:
    """The same of MODEL's weights alone: file, what to compute in, family, weight patches. Raises Refused."""
    path = _file(model)
    config = model.model.model_config
    if config.quant_config is not None:
        raise Refused(f"{os.path.basename(path)} is a quantised checkpoint, which the workers cannot read; "
                      "use a bf16, fp16 or fp32 file")  # fmt: skip
    unet_config = {key: value for key, value in config.unet_config.items() if _is_plain(value) and key != WEIGHTLESS}
    size, mtime_ns = _unchanged(model, path)
    shapes = _shapes(path, size, mtime_ns)
    family = recognise(shapes, unet_config)
    spec = ModelSpec(
        path=os.path.realpath(path),
        size=size,
        mtime_ns=mtime_ns,
        weight_dtype=_name(model.model.get_dtype()),
        compute_dtype=_name(model.model.get_dtype_inference()) if dtype == "auto" else dtype,  # type: ignore[arg-type]
        comfy=ComfyModel(config_class=type(config).__name__, unet_config=json.dumps(unet_config, sort_keys=True)),
        patches=str(model.patches_uuid) if model.patches else "",
    )
    weights = describe_weights(model, {family.comfy_name(name): shape for name, shape in shapes.items()})
    return spec, family, weights


def describe_job(
    guider: comfy.samplers.CFGGuider,
    family: Family,
    patches: Patches,
    noise: Tensor,
    latent: Tensor,
    sampler: comfy.samplers.Sampler,
    sigmas: Tensor,
    mask: Tensor | None,
    seed: int | None,
    latent_shapes: list | None,
) -> SamplingJob:
    """One call of `guider.outer_sample`, ready to be sent. Raises Refused."""
    if latent_shapes is not None and len(latent_shapes) > 1:
        raise Refused(
            "a latent of several streams (audio and video) cannot be sampled by CP Sampler yet; sample it with KSampler"
        )
    kind, attributes = check_guider(guider)
    check_sampler(sampler)
    check_latent(guider.model_patcher, noise)
    check_conds(guider.model_patcher, guider.conds, family, noise, latent, mask, seed)
    return SamplingJob(
        guider=kind,
        guider_attributes=attributes,
        conds={name: _described(name, conds) for name, conds in guider.conds.items()},
        sampler=_sampler(sampler),
        noise=noise,
        latent=latent,
        mask=mask,
        sigmas=sigmas,
        seed=seed,
        random_seed=torch.initial_seed(),
        random_state=torch.get_rng_state(),
        model_sampling=_sampling(guider.model_patcher.get_model_object("model_sampling")),
        model_options=patches.options,
        wrappers=patches.wrappers,
        patches=patches.weights,
    )


def _unchanged(model: ModelPatcher, path: str) -> tuple[int, int]:
    """Size and mtime_ns of the file. Raises Refused where it is no longer the one that MODEL was first seen with."""
    if not os.path.isfile(path):
        raise Refused(f"the file of this MODEL is gone: {path}")
    stat = os.stat(path)
    now = (stat.st_size, stat.st_mtime_ns)
    if model.model not in _first_seen and still_holds(path, model):
        _first_seen[model.model] = now
    if _first_seen.get(model.model) != now:
        raise Refused(f"{path} changed on disk after this MODEL was loaded from it; have ComfyUI load it again: "
                      "Unload models and free the node cache, or restart")  # fmt: skip
    return now


@functools.lru_cache(maxsize=16)
def _shapes(path: str, size: int, mtime_ns: int) -> Shapes:
    """Read once as long as the file is the same: this is asked before every run, and every evaluation of some."""
    return header(path).shapes


def _file(model: ModelPatcher) -> str:
    init = getattr(model, "cached_patcher_init", None)
    if init is None or init[0].__name__ not in LOADERS:
        raise Refused("this MODEL does not say which file it came from; CP Sampler needs one from Load Diffusion "
                      "Model or Load Checkpoint")  # fmt: skip
    path = init[1][0]
    options = next((part for part in init[1][1:] if isinstance(part, dict)), {})
    for name, value in options.items():
        if value and name not in HONOURED_LOADER_OPTIONS:
            raise Refused(f"the loader option {name}={value} is not honoured by the workers; load without it")
    return path


def _sampling(sampling: torch.nn.Module) -> dict[str, Any]:
    kind = type(sampling)  # made inside a function, of ComfyUI's bases; or one of ComfyUI's own
    bases = kind.__bases__ if LOCAL in kind.__qualname__ else (kind,)
    if kind not in bases and any(callable(own) for own in vars(kind).values()):
        raise Refused(f"the model sampling {title(kind)} has code of its own, which the workers cannot have")
    attributes = {k: v for k, v in vars(sampling).items() if not k.startswith("_") and k != "training"}
    for name, value in attributes.items():
        if not _is_plain(value):
            raise Refused(f"the model's sampling has {name} = {value!r}, which cannot be sent to the workers")
    return {
        "bases": [reference(base, "the model sampling") for base in bases],
        "attributes": attributes,
        "buffers": dict(sampling.named_buffers()),
    }


def _sampler(sampler: comfy.samplers.Sampler) -> Any:
    with or_else(SAMPLE_HERE):
        return describe(sampler, "the SAMPLER")


def _described(name: str, conds: list[dict[str, Any]]) -> Any:
    """Converted conditions without what ComfyUI makes anew from the rest."""
    sendable = [{key: value for key, value in cond.items() if key not in ("uuid", "model_conds")} for cond in conds]
    with or_else(WAY_OUT):
        return describe(sendable, f"{name}: the CONDITIONING")


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
