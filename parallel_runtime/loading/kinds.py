"""The kinds of values that workers get: for each a row of KINDS, with what is sent of one and what makes it again.

Only names of code and plain values travel, beside tensors, never code; names outside of ComfyUI are refused
(code_names.py), and nothing is evaluated.
"""

from __future__ import annotations

import functools
import itertools
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from types import CellType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from comfy.controlnet import ControlBase
from comfy.gligen import Gligen
from comfy.model_management import cast_to_device, get_torch_device
from comfy.model_patcher import ModelPatcher
from torch import Tensor, nn

from ..errors import Refused
from ..wire.bundles import check_tensor
from .code_names import LOCAL, Unsendable, code_named, is_comfyui, module_named, named, qualified_name, reference
from .fingerprint import code_fingerprint

if TYPE_CHECKING:
    from .object_codec import Parts, Rebuilder

HYPERNETWORK = "comfy_extras.nodes_hypernetwork.load_hypernetwork_patch.<locals>.hypernetwork_patch"
# Each run sets these attributes of objects and variables of functions before it reads them.
SET_BY_EACH_RUN = {
    "comfy.context_windows:IndexListContextHandler": ("_model",),
    "comfy_extras.nodes_tomesd:TomePatchModel.execute.<locals>.tomesd_m": ("u",),
    "comfy_extras.nodes_tomesd:TomePatchModel.execute.<locals>.tomesd_u": ("u",),
}
Node = dict[str, Any]  # the description of one value: its kind, and what that kind's row says
_tensor_numbers = itertools.count()  # of this process: tensors of several descriptions may lie in one bundle


@dataclass(frozen=True)
class Kind:
    """A kind of values: which ones, what is sent of one, and what makes it again. `describe` calls `to` for each part,
    and `rebuild` calls `make` for what that has returned, in the same order."""

    fits: Callable[[Any], bool]
    describe: Callable[[Any, Parts], Node]
    rebuild: Callable[[Node, Rebuilder], Any]


class Encoded:
    """Replaces the VAE of a model patch or ControlNet, whose pictures nodes/describe/ has encoded."""

    def __init__(self, compression: int) -> None:
        self.compression = compression

    def spacial_compression_encode(self) -> int:
        return self.compression

    def temporal_compression_decode(self) -> int:
        return 1

    def encode(self, pixels: Tensor) -> NoReturn:
        """Raises Refused: ComfyUI encodes again only pixels [B, H, W, C] of another size than the full latent."""
        height, width = pixels.shape[1:3]
        raise Refused("patch.size", width=width, height=height)


def _describe_tensor(value: Tensor, to: Parts) -> Node:
    if value.is_meta:
        raise Refused("unsendable.weight", what=to.what)
    check_tensor(value, to.what)
    name = f"described {next(_tensor_numbers)}"
    to.describer.tensors[name] = value
    return {"name": name, "on_cpu": value.device.type == "cpu"}


def _rebuild_tensor(node: Node, make: Rebuilder) -> Tensor:
    tensor = make.tensors[node["name"]]
    return tensor if node["on_cpu"] else tensor.to(get_torch_device())


def _has_conversion(value: Any) -> bool:
    """Is this a weight of a merged model, with the method of its layer of ComfyUI's that dequantizes it?"""
    if type(value) is not tuple or len(value) != 2 or not isinstance(value[1], MethodType):
        return False
    weight, method = value
    return isinstance(weight, Tensor) and is_comfyui(method) and method.__name__.startswith("convert_")


def _describe_merged(value: tuple[Tensor, MethodType], to: Parts) -> Node:
    """Describes the weight alone, since no layer can be sent, dequantized as ComfyUI does it to merge it: in float32."""
    weight, convert = value
    if type(weight.data) is not Tensor or weight.itemsize == 1:
        weight = convert(cast_to_device(weight, weight.device, torch.float32, copy=True), inplace=True)
    return {"of": to(weight)}


@functools.cache
def _unconverted() -> Callable[..., Any]:
    """Returns the function that ComfyUI has beside a merged weight whose layer converts nothing."""
    cpu = torch.device("cpu")
    function: Callable[..., Any] = ModelPatcher(nn.Linear(1, 1), cpu, cpu).get_key_patches()["weight"][0][1]
    return function


def _describe_method(method: MethodType, to: Parts) -> Node:
    """Raises Unsendable for a function that its object's class does not have."""
    owner = method.__self__ if isinstance(method.__self__, type) else type(method.__self__)
    own = getattr(owner, method.__name__, None)
    if getattr(own, "__func__", own) is not method.__func__:
        raise Unsendable("unsendable.foreign", what=to.what, thing=qualified_name(method.__func__))
    return {"of": to(method.__self__), "name": method.__name__}


def _describe_function(function: FunctionType, to: Parts) -> Node:
    """Describes a function that another one has made."""
    if not is_comfyui(function):
        raise Unsendable("unsendable.foreign", what=to.what, thing=qualified_name(function))
    to = replace(to, what=f"{to.what} {qualified_name(function)}")
    name = f"{qualified_name(function).removesuffix('.' + function.__qualname__)}:{function.__qualname__}"
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    to.describer.emptied.update(id(cells[variable]) for variable in SET_BY_EACH_RUN.get(name, ()))
    return {
        "name": name,
        "code": code_fingerprint(function.__code__),
        "cells": to.each(cells.values()),
        "defaults": to(function.__defaults__),
        "keyword_defaults": to(function.__kwdefaults__),
        "attributes": to({name: value for name, value in vars(function).items() if name != "__wrapped__"}),
    }


def _rebuild_function(node: Node, make: Rebuilder) -> FunctionType:
    code, (module, _, path) = code_named(node["name"], node["code"]), node["name"].partition(":")
    cells, defaults = make(node["cells"]), make(node["defaults"])
    made = FunctionType(code, vars(module_named(module)), argdefs=defaults, closure=tuple(cells))
    made.__qualname__ = path
    made.__kwdefaults__ = make(node["keyword_defaults"])
    vars(made).update(make(node["attributes"]))
    return made


def _describe_cell(cell: CellType, to: Parts) -> Node:
    """Describes a closure's variable, which several functions may share."""
    return {"of": None if id(cell) in to.describer.emptied else to(cell.cell_contents)}


def _is_loaded(value: Any) -> bool:
    return isinstance(value, ModelPatcher | ControlBase | Gligen) or qualified_name(value) == HYPERNETWORK


def _describe_loaded(value: Any, to: Parts) -> Node:
    if to.describer.describe_loaded is None:
        raise Unsendable("unsendable.object", what=to.what, thing=qualified_name(type(value)))
    return to.describer.describe_loaded(value, to)


def _rebuild_loaded(node: Node, make: Rebuilder) -> Any:
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
    if node["hint"] is not None:
        made.cond_hint_original = made.cond_hint = make(node["hint"]).to(get_torch_device())
        made.vae = Encoded(node["compression"])
    else:
        made.cond_hint_original = make(node["image"]).movedim(-1, 1)
        made.extra_concat_orig = make(node["masks"])
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
        "attributes": to({name: value for name, value in vars(sampling).items() if name not in vars(nn.Module())}),
        "buffers": to(dict(sampling.named_buffers())),
    }


def _rebuild_sampling(node: Node, make: Rebuilder) -> nn.Module:
    made: nn.Module = nn.Module.__new__(type("ModelSampling", tuple(map(named, node["bases"])), {}))
    nn.Module.__init__(made)
    vars(made).update(make(node["attributes"]))
    for name, buffer in make(node["buffers"]).items():
        made.register_buffer(name, buffer)
    return made


def _describe_object(value: Any, to: Parts) -> Node:
    kind = type(value)
    container = isinstance(value, list | tuple | dict | set | frozenset)
    if container or isinstance(value, nn.Module) or not hasattr(value, "__dict__") or not is_comfyui(kind):
        raise Unsendable("unsendable.object", what=to.what, thing=qualified_name(kind))
    name = reference(kind, to.what)
    made_anew = SET_BY_EACH_RUN.get(name, ())
    return {"class": name, "attributes": to({key: part for key, part in vars(value).items() if key not in made_anew})}


def _rebuild_object(node: Node, make: Rebuilder) -> Any:
    kind = named(node["class"])
    made = kind.__new__(kind)
    vars(made).update(make(node["attributes"]))
    return made


def _of(*types: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, types)


def _exactly(*types: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in types


def _is_named(value: Any) -> bool:
    return isinstance(value, type) or (isinstance(value, FunctionType) and LOCAL not in value.__qualname__)


KINDS = {  # a value is of the first kind that fits
    "list": Kind(_exactly(list), lambda value, to: {"items": to.each(value)}, lambda node, make: make(node["items"])),
    "merged": Kind(_has_conversion, _describe_merged, lambda node, make: (make(node["of"]), _unconverted())),
    "tuple": Kind(
        _exactly(tuple, torch.Size),
        lambda value, to: {"items": to.each(value)},
        lambda node, make: tuple(make(node["items"])),
    ),
    "set": Kind(
        _exactly(set), lambda value, to: {"items": to.each(value)}, lambda node, make: set(make(node["items"]))
    ),
    "dict": Kind(
        _exactly(dict),
        lambda value, to: {"items": [to.each(item) for item in value.items()]},
        lambda node, make: dict(make(node["items"])),
    ),
    "tensor": Kind(_of(Tensor), _describe_tensor, _rebuild_tensor),
    "dtype": Kind(
        _of(torch.dtype),
        lambda value, to: {"name": str(value).removeprefix("torch.")},
        lambda node, make: getattr(torch, node["name"]),
    ),
    "device": Kind(
        _of(torch.device),
        lambda value, to: {"on_cpu": value.type == "cpu"},
        lambda node, make: torch.device("cpu") if node["on_cpu"] else get_torch_device(),
    ),
    "uuid": Kind(_of(uuid.UUID), lambda value, to: {"text": str(value)}, lambda node, make: uuid.UUID(node["text"])),
    "enum": Kind(
        _of(Enum),
        lambda value, to: {"class": reference(type(value), to.what), "name": value.name},
        lambda node, make: named(node["class"])[node["name"]],
    ),
    "encoded": Kind(
        _of(Encoded),
        lambda value, to: {"compression": value.compression},
        lambda node, make: Encoded(node["compression"]),
    ),
    "loaded": Kind(_is_loaded, _describe_loaded, _rebuild_loaded),
    "name": Kind(
        _is_named, lambda value, to: {"name": reference(value, to.what)}, lambda node, make: named(node["name"])
    ),
    "function": Kind(_of(FunctionType), _describe_function, _rebuild_function),
    "cell": Kind(_of(CellType), _describe_cell, lambda node, make: CellType(make(node["of"]))),
    "method": Kind(_of(MethodType), _describe_method, lambda node, make: getattr(make(node["of"]), node["name"])),
    "sampling": Kind(_is_sampling, _describe_sampling, _rebuild_sampling),
    "object": Kind(lambda value: True, _describe_object, _rebuild_object),
}
