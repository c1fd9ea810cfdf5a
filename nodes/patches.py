"""What lies on a MODEL and changes its weights or its guidance, in words for the workers. Raises Refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from comfy.weight_adapter import WeightAdapterBase

from ..parallel_runtime.errors import Refused
from .code import describe, or_else, title

WAY_OUT = "remove it, or sample this MODEL with KSampler"
PREFIX = "diffusion_model."
WRAPPERS = {
    WrappersMP.OUTER_SAMPLE, WrappersMP.SAMPLER_SAMPLE, WrappersMP.PREDICT_NOISE, WrappersMP.CALC_COND_BATCH,
    WrappersMP.APPLY_MODEL, WrappersMP.DIFFUSION_MODEL,
}  # fmt: skip
FUNCTIONS = {
    "sampler_cfg_function": "the CFG function",
    "sampler_post_cfg_function": "the post-CFG function",
    "sampler_pre_cfg_function": "the pre-CFG function",
    "sampler_calc_cond_batch_function": "the evaluation of the conditions",
    "denoise_mask_function": "the denoise mask function",
}
OPTIONS = {"disable_cfg1_optimization"}
TRANSFORMER_OPTIONS = {"easycache"}
# Guidance whose code names one of these has the transformer's blocks do something else: PAG, skip-layer guidance...
INTO_BLOCKS = {"set_model_options_patch_replace", "patches_replace", "transformer_options"}

Shapes = Mapping[str, tuple[int, ...]]


def describe_options(model: ModelPatcher) -> dict[str, Any]:
    """MODEL's model_options as far as they are honoured; nodes/refusals.py has refused the others."""
    options = model.model_options
    described = {key: value for key, value in options.items() if key in OPTIONS}
    for key, what in FUNCTIONS.items():
        if options.get(key):
            _check_stays_outside(options[key], what)
            described[key] = _describe(options[key], what)
    inside = options.get("transformer_options", {})
    described["transformer_options"] = _describe(
        {key: inside[key] for key in TRANSFORMER_OPTIONS & inside.keys()}, "a transformer option"
    )
    return described


def describe_wrappers(model: ModelPatcher) -> list[list[Any]]:
    """[kind, key, functions] of each group of wrappers on MODEL, in their order."""
    return [
        [kind, key, _describe(functions, f"the {kind} wrapper")]
        for kind, by_key in model.wrappers.items()
        for key, functions in by_key.items()
        if functions
    ]


def describe_weights(model: ModelPatcher, shapes: Shapes) -> dict[str, list[Any]]:
    """MODEL's weight patches (LoRA and its kin, merged models) by weight; `shapes` go by ComfyUI's names."""
    described = {}
    for key, patches in model.patches.items():
        name = key.removeprefix(PREFIX)
        if name == key or name not in shapes:
            raise Refused(f"a LoRA or merge changes {key}, which this model's file has no weight for; {WAY_OUT}")
        for _, value, *_ in patches:
            _check_shape(name, value, shapes[name])
        described[name] = [_describe(patch, f"the LoRA or merge on {name}") for patch in patches]
    return described


def _describe(value: Any, what: str) -> Any:
    with or_else(WAY_OUT):
        return describe(value, what)


def _check_shape(name: str, value: Any, shape: tuple[int, ...]) -> None:
    if isinstance(value, WeightAdapterBase):
        wanted = value.calculate_shape(name)
    else:
        wanted = tuple(value[1][0].shape) if _pads(value) else None
    if wanted is not None and tuple(wanted) != tuple(shape):
        raise Refused(
            f"a LoRA makes {name} another size ({list(shape)} becomes {list(wanted)}), which workers cannot; "
            f"use a checkpoint that has it merged, or sample this MODEL with KSampler"
        )


def _pads(value: Any) -> bool:
    """Is this ("diff", (tensor, {"pad_weight": True}))?"""
    return isinstance(value, tuple) and len(value) == 2 and len(value[1]) > 1 and bool(value[1][1].get("pad_weight"))


def _check_stays_outside(functions: Any, what: str) -> None:
    for function in functions if isinstance(functions, list) else [functions]:
        if found := INTO_BLOCKS & set(names_in(getattr(function, "__code__", None))):
            raise Refused(
                f"{what} {title(function)} reaches into the transformer ({', '.join(sorted(found))}); {WAY_OUT}"
            )


def names_in(code: CodeType | None) -> Iterator[str]:
    """What a function's code and the functions in it name: attributes, globals, keys."""
    if code is not None:
        yield from code.co_names
        yield from (constant for constant in code.co_consts if isinstance(constant, str))
        for inner in code.co_consts:
            if isinstance(inner, CodeType):
                yield from names_in(inner)
