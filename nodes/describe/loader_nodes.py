"""The node that has made a MODEL which does not say where it comes from: workers call it with the same inputs.

torch tells us of each network that is put into a model, and ComfyUI which node of which prompt runs at that moment.
"""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import folder_paths
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher
from comfy_execution.graph import NodeNotFoundError
from comfy_execution.graph_utils import is_link
from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context
from nodes import NODE_CLASS_MAPPINGS  # type: ignore[attr-defined]  # ComfyUI's module, not our package
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from ...parallel_runtime.errors import Refused
from ...parallel_runtime.loading.code_names import Unsendable, qualified_name, reference
from ...parallel_runtime.loading.fingerprint import stat_file
from ...parallel_runtime.loading.node_loader import network_fingerprint
from ...parallel_runtime.loading.packs import files_of, packs_named
from ...parallel_runtime.specs import ModelSpec
from .in_place import NETWORK, KnownPart, changed_since_made, parts_of


@dataclass(frozen=True)
class NodeCall:
    """A node of the prompt that ran, with its inputs there, values or links to other nodes, and the network as the node
    put it into a model."""

    node: str
    inputs: dict[str, Any]
    made: dict[str, KnownPart]


_calls: MutableMapping[Any, NodeCall] = WeakIdKeyDictionary()  # by ComfyUI's model around the network


def note_loaders() -> None:
    """Has torch tell us of networks from now on."""
    register_module_module_registration_hook(_note)


def _note(owner: nn.Module, name: str, network: nn.Module | None) -> None:
    is_model = name == NETWORK and isinstance(owner, BaseModel) and "latent_format" in vars(owner)
    if not is_model or network is None or (running := get_executing_context()) is None:
        return
    with suppress(NodeNotFoundError):  # a pack may run a prompt of its own
        node = get_progress_state().dynprompt.get_node(running.node_id)
        made = parts_of(owner.latent_format, network)
        _calls[owner] = NodeCall(node["class_type"], dict(node["inputs"]), made)


def note_call(model: BaseModel, node: str, inputs: dict[str, Any]) -> None:
    """Has workers call this node for the MODEL that it has just made."""
    _calls[model] = NodeCall(node, inputs, parts_of(model.latent_format, model.diffusion_model))


def spec_by_node(model: ModelPatcher) -> ModelSpec:
    """Returns the call of the node with which workers load this MODEL, and plain attributes that have changed since.
    Raises Refused, by the node's name, where they cannot call it."""
    call = _calls.get(model.model)
    if call is None:
        raise Refused("model.nameless", kind=qualified_name(type(model)))
    for name, value in call.inputs.items():
        if is_link(value):
            raise Refused("loader.linked", node=call.node, name=name)
    try:
        loader = reference(NODE_CLASS_MAPPINGS[call.node], f"the loader {call.node}")
    except Unsendable as unsendable:
        raise Refused("loader.foreign", reason=unsendable.sentence) from None
    folders = {name: list(paths) for name, (paths, *_) in folder_paths.folder_names_and_paths.items()}
    files = {folder_paths.get_full_path(folder, text) for text in call.inputs.values() if isinstance(text, str)
             for folder in folders}  # fmt: skip
    return ModelSpec(
        loader=loader,
        arguments=json.dumps(
            {"inputs": call.inputs, "folders": folders, "pack_files": files_of(packs_named(loader))}, sort_keys=True
        ),
        files=tuple(stat_file(path) for path in sorted(filter(None, files))),
        weight_dtype=str(model.model.get_dtype()).removeprefix("torch."),
        dynamic_vram=model.is_dynamic(),
        attributes=changed_since_made(model, call.made, call.node),
        weights_fingerprint=network_fingerprint(model),
    )
