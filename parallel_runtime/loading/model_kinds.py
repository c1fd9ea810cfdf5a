"""The kinds of values that are models, networks, or parts of them; and what a kind is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from comfy.controlnet import ControlBase
from comfy.gligen import Gligen
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher
from comfy.sd import VAE
from torch import nn

from .code_names import LOCAL, Unsendable, is_of_a_pack, named, qualified_name, reference

if TYPE_CHECKING:
    from .object_codec import Parts, Rebuilder

HYPERNETWORK = "comfy_extras.nodes_hypernetwork.load_hypernetwork_patch.<locals>.hypernetwork_patch"
MODULE_STATE = set(vars(nn.Module()))
Node = dict[str, Any]  # the description of one value: its kind, and what that kind's row says


@dataclass(frozen=True)
class Kind:
    """A kind of values: which ones, what is sent of one, and what makes it again. `describe` calls `to` for each part,
    and `rebuild` calls `make` for what that has returned, in the same order."""

    fits: Callable[[Any], bool]
    describe: Callable[[Any, Parts], Node]
    rebuild: Callable[[Node, Rebuilder], Any]


def of_types(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


def exactly(*types: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in types


def _is_loaded(value: Any) -> bool:
    loaded = isinstance(value, ModelPatcher | BaseModel | ControlBase | Gligen | VAE)
    return loaded or qualified_name(value) == HYPERNETWORK


def _describe_loaded(value: Any, to: Parts) -> Node:
    """Describes a model that ComfyUI has loaded: by its file, or as (a clone of) the MODEL that is sampled."""
    model = to.describer.model
    if model is not None and value is model.model:
        return {"of_model": "model"}
    if model is not None and isinstance(value, ModelPatcher) and value.model is model.model:
        if value.object_patches == model.object_patches:
            return {"of_model": "patcher"}
        raise Unsendable("unsendable.clone", what=to.what)
    if isinstance(value, BaseModel) or to.describer.describe_loaded is None:
        raise Unsendable("unsendable.object", what=to.what, thing=qualified_name(type(value)))
    return to.describer.describe_loaded(value, to)


def _rebuild_loaded(node: Node, make: Rebuilder) -> Any:
    if "of_model" in node:
        return make.patcher if node["of_model"] == "patcher" else make.patcher and make.patcher.model
    if node["file"]["kind"] == "vae":
        return make.load({**node["file"], "weights": make(node["weights"])})
    loaded = make.load(node["file"])
    match node["file"]["kind"]:
        case "control_net":
            return _control_net_of_a_run(loaded.copy(), node, make)
        case "hypernetwork":
            return type(loaded)(loaded.hypernet, node["file"]["strength"])
    return loaded.model if node["network_alone"] else loaded


def _control_net_of_a_run(made: Any, node: Node, make: Rebuilder) -> Any:
    """A ControlNet is made for one run, so that nothing is left of another one's hint."""
    vars(made).update(make(node["settings"]))
    made.cond_hint_original = make(node["image"]).movedim(-1, 1)
    made.extra_concat_orig = make(node["masks"])
    made.vae = make(node["vae"])
    made.previous_controlnet = make(node["previous"])
    return made


def _is_sampling(value: Any) -> bool:
    return isinstance(value, nn.Module) and hasattr(value, "percent_to_sigma")


def _describe_sampling(sampling: nn.Module, to: Parts) -> Node:
    kind = type(sampling)  # ComfyUI makes most of these classes in a function, from bases that have a name
    bases = kind.__bases__ if LOCAL in kind.__qualname__ else (kind,)
    if kind not in bases and any(map(callable, vars(kind).values())):
        raise Unsendable("unsendable.sampling", kind=qualified_name(kind))
    return {
        "bases": [reference(base, to.what) for base in bases],
        "attributes": to({name: value for name, value in vars(sampling).items() if name not in MODULE_STATE}),
        "buffers": to(dict(sampling.named_buffers())),
    }


def _rebuild_sampling(node: Node, make: Rebuilder) -> nn.Module:
    made: nn.Module = nn.Module.__new__(type("ModelSampling", tuple(map(named, node["bases"])), {}))
    nn.Module.__init__(made)
    vars(made).update(make(node["attributes"]))
    for name, buffer in make(node["buffers"]).items():
        made.register_buffer(name, buffer)
    return made


def _describe_network(network: nn.Module, to: Parts) -> Node:
    """Describes a part of the network by its path; a pack's, or torch's layers, by class, values and weights."""
    if (path := to.describer.network_paths.get(id(network))) is not None:
        to.describer.names_network = True
        return {"path": path}
    values, kind = vars(network), type(network)
    if not (kind.__module__.startswith("torch.nn.modules.") or is_of_a_pack(kind)):
        raise Unsendable("unsendable.object", what=to.what, thing=qualified_name(kind))
    if any(values[name] for name in MODULE_STATE if "hooks" in name and name in values):
        raise Unsendable("unsendable.object", what=to.what, thing=f"{qualified_name(type(network))} with hooks")
    return {
        "class": reference(type(network), to.what),
        "attributes": to({name: value for name, value in values.items() if name not in MODULE_STATE}),
        "training": network.training,
        "parameters": to({name: None if one is None else one.data for name, one in network._parameters.items()}),
        "buffers": to(dict(network._buffers)),
        "modules": to(dict(network._modules)),
    }


def _rebuild_network(node: Node, make: Rebuilder) -> nn.Module:
    if "path" in node:
        network: nn.Module = make.patcher.model.diffusion_model  # type: ignore[union-attr]
        return network.get_submodule(node["path"])
    kind = named(node["class"])
    made: nn.Module = kind.__new__(kind)
    nn.Module.__init__(made)
    vars(made).update(make(node["attributes"]), training=node["training"])
    for name, weight in make(node["parameters"]).items():
        made._parameters[name] = None if weight is None else nn.Parameter(weight, requires_grad=False)
    made._buffers.update(make(node["buffers"]))
    made._modules.update(make(node["modules"]))
    return made


MODEL_KINDS = {
    "loaded": Kind(_is_loaded, _describe_loaded, _rebuild_loaded),
    "sampling": Kind(_is_sampling, _describe_sampling, _rebuild_sampling),
    "network": Kind(of_types(nn.Module), _describe_network, _rebuild_network),
}


def controls_of(conds: dict[str, Any]) -> list[ControlBase]:
    """Returns all ControlNets of these conditions, each once, with those that they are chained to."""
    controls: dict[ControlBase, None] = {}
    for control in (cond.get("control") for prompt in conds.values() for cond in prompt):
        while control is not None:
            controls[control] = None
            control = control.previous_controlnet
    return list(controls)
