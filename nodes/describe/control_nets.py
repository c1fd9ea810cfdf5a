"""Describes ComfyUI's ControlNets, Control-LoRAs and T2I adapters: the file, the settings, the hint.

The workers load the file with ComfyUI's own loader, and the VAE that encodes its hint. ComfyUI's own loop calls both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import torch
from comfy.controlnet import ControlBase, ControlLora, ControlNet, ControlNetSD35, QwenFunControlNet, T2IAdapter
from comfy.model_patcher import ModelPatcher
from torch import Tensor

from .model_files import shared_part, source_file

Conds = Mapping[str, list[dict[str, Any]]]  # a guider's conditions: for each name, such as positive, ComfyUI's dicts

METHODS = ("pre_run", "get_control", "control_merge", "copy", "cleanup")
OUTPUTS = ("controlnet_blocks", "controlnet_single_blocks", "control_blocks")  # each of these modules gives a residual
KINDS = (ControlNet, ControlNetSD35, QwenFunControlNet, ControlLora, T2IAdapter)
SETTINGS = (  # attributes that nodes and loaders set; all others belong to a run or to the loaded file
    "strength", "timestep_percent_range", "extra_args", "extra_conds", "strength_type", "global_average_pooling",
    "compression_ratio", "upscale_algorithm", "concat_mask",
)  # fmt: skip


def controls_of(conds: Conds) -> list[ControlBase]:
    """Returns all ControlNets of these conditions, each once, with those that they are chained to."""
    return list(dict.fromkeys(control for prompt in conds.values() for cond in prompt for control in _chain(cond)))


def _chain(cond: Mapping[str, Any]) -> Iterator[ControlBase]:
    control = cond.get("control")
    while control is not None:
        yield control
        control = control.previous_controlnet


def gligens_of(conds: Conds) -> list[ModelPatcher]:
    """Returns the GLIGEN models of these conditions, each once. They make as many boxes as there are images in a
    batch."""
    models = (cond["gligen"][1] for prompt in conds.values() for cond in prompt if cond.get("gligen"))
    return list(dict.fromkeys(models))


def is_patched(control: ControlBase) -> bool:
    """Does the ControlNet carry code or a LoRA that is not in its file?"""
    patcher = getattr(control, "control_model_wrapped", None)
    patched = patcher is not None and (patcher.patches or patcher.object_patches or patcher.hook_patches)
    return bool(patched) or control.extra_hooks is not None


def called_functions(control: ControlBase) -> list[Any]:
    """Returns the functions that a run calls on the ControlNet and its network; a pack may have replaced them."""
    network = network_of(control)
    return [getattr(control, name) for name in METHODS] + ([] if network is None else [network.forward])


def describe_control_net(control: ControlBase, to: Callable[[Any], Any]) -> dict[str, Any]:
    """Describes a ControlNet; `to` describes the values within it. Raises LookupError where its file is unknown,
    Refused where the file has changed."""
    file, dtypes = source_file(control), ("", "")
    if isinstance(control, ControlNet) and not isinstance(control, ControlLora):
        dtypes = _dtype_name(control.control_model.dtype), _dtype_name(control.manual_cast_dtype)
    return {
        "file": {"kind": "control_net", **asdict(file), "dtype": dtypes[0], "computed": dtypes[1]},
        "settings": to({name: getattr(control, name) for name in SETTINGS}),
        "image": to(control.cond_hint_original.movedim(1, -1)),  # as it lies in memory
        "masks": to(list(control.extra_concat_orig)),
        "vae": to(control.vae),
        "previous": to(control.previous_controlnet),
    }


def _dtype_name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def network_of(control: ControlBase) -> torch.nn.Module | None:
    """Returns the ControlNet's network; None for a Control-LoRA, which makes one from its MODEL's as a run begins."""
    return None if isinstance(control, ControlLora) else shared_part(control)


def weights_of(control: ControlBase) -> Iterable[Tensor]:
    network = network_of(control)
    return control.control_weights.values() if network is None else network.parameters()


def weight_bytes(controls: Iterable[ControlBase]) -> int:
    """Returns the bytes of all their weights; weights that several share count once."""
    bytes_by_id = {id(weight): weight.nbytes for control in controls for weight in weights_of(control)}
    return sum(bytes_by_id.values())


def count_residuals(controls: Iterable[ControlBase], layers: int) -> int:
    """Counts the tensors of all tokens that ControlNets give to a network of this many `layers`: each one's residuals,
    and a chain's sums for every layer."""
    outputs = (getattr(network_of(control), name, ()) for control in controls for name in OUTPUTS)
    return sum(map(len, outputs)) + layers * sum(control.previous_controlnet is not None for control in controls)
