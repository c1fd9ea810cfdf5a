"""diffusers' `_cp_plan` read as our Plan, for the transformers whose streams we know.

A `_cp_plan` says which dims are cut, not which stream a tensor belongs to nor what an attention runs over: that is
written here, one entry a class. Classes whose plan is missing or wrong have one of ours (plans). A class that is not
listed is refused; guessing would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from torch import nn

from ...old_plan import Gather, Local, Plan, Split
from .plans import PLANS


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """What one class's `_cp_plan` leaves unsaid. `outputs`: streams of cut module outputs, by module name."""

    joint: tuple[str, ...]
    outputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    attention: Mapping[str, tuple[str, ...] | Local] = field(default_factory=dict)
    whole: tuple[str, ...] = ()  # arguments that we do not cut, although diffusers does


_STREAM_OF_ARGUMENT = {
    "hidden_states": "image",
    "img_ids": "image",
    "timestep": "image",
    "modulate_index": "image",
    "encoder_hidden_states": "text",
    "encoder_hidden_states_mask": "text",
    "txt_ids": "text",
}

_TEXT_AND_IMAGE = _Reading(joint=("text", "image"))
_WAN = _Reading(joint=("image",), outputs={"rope": ("image", "image")}, attention={"blocks.*.attn2": "local"})

_READINGS = {
    "FluxTransformer2DModel": _TEXT_AND_IMAGE,
    "Flux2Transformer2DModel": _TEXT_AND_IMAGE,
    "QwenImageTransformer2DModel": _Reading(joint=("text", "image"), outputs={"pos_embed": ("image", "text")}),
    "WanTransformer3DModel": _WAN,
    "ChronoEditTransformer3DModel": _WAN,
    # Its cross-attention reads the text only as keys: whole on every rank, it needs no exchange and no mask is cut.
    "LTXVideoTransformer3DModel": _Reading(
        joint=("image",),
        outputs={"rope": ("image", "image")},
        attention={"transformer_blocks.*.attn2": "local"},
        whole=("encoder_hidden_states", "encoder_attention_mask"),
    ),
}


def plan_of(transformer: nn.Module) -> Plan:
    """The Plan of a transformer: ours, or from its class's `_cp_plan`; ValueError if we do not know the class."""
    for kind in type(transformer).__mro__:  # FSDP makes a subclass of each module's class
        if kind.__name__ in PLANS:
            return PLANS[kind.__name__]
        if kind.__name__ in _READINGS:
            return _read(vars(kind)["_cp_plan"], _READINGS[kind.__name__])
    known = ", ".join([*_READINGS, *PLANS])
    raise ValueError(
        f"no context-parallel plan is known for {type(transformer).__name__} (known: {known}); pass plan=Plan(...)"
    )


def _read(cp_plan: Mapping[str, Any], reading: _Reading) -> Plan:
    inputs: dict[str, dict[str, Split]] = {}
    outputs_split: dict[str, dict[int, Split]] = {}
    outputs: dict[str, Mapping[int, Gather]] = {}
    for module, entry in cp_plan.items():
        if not isinstance(entry, dict):
            outputs[module] = dict(enumerate(_gathers(entry)))
            continue
        for key, cut in entry.items():
            if cut.split_output:
                outputs_split.setdefault(module, {})[key] = _split(cut, reading.outputs[module][key])
            elif key not in reading.whole:
                inputs.setdefault(module, {})[key] = _split(cut, _STREAM_OF_ARGUMENT[key])
    return Plan(
        inputs=inputs, outputs_split=outputs_split, outputs=outputs, joint=reading.joint, attention=reading.attention
    )


def _split(cut: ContextParallelInput, stream: str) -> Split:
    if cut.split_dim == 0 and cut.expected_dims == 2:
        # Flux: [S, 3] ids, and [1, S, 3] from older callers; counted from the end, one dim serves both.
        return Split(dim=-2, stream=stream)
    return Split(dim=cut.split_dim, stream=stream, ndim=cut.expected_dims)


def _gathers(entry: ContextParallelOutput | Iterable[ContextParallelOutput]) -> Iterable[Gather]:
    entries = [entry] if isinstance(entry, ContextParallelOutput) else entry
    return [Gather(dim=output.gather_dim, stream="image") for output in entries]
