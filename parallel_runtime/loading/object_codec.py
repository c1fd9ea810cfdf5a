"""Describes values in ComfyUI's process (Describer), and makes them again in a worker (Rebuilder). What is in several
places is described and made once. Both sides of each kind of values stand in kinds.py.

What code of a pack has changed during a run is described in the worker (`Rebuilder.changes`), and given to the same
values of ComfyUI's process (`Describer.take_back`)."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from numbers import Number
from typing import Any

from comfy.controlnet import ControlBase
from comfy.gligen import Gligen
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher
from comfy.sd import VAE
from torch import Tensor, nn

from ..errors import Refused
from ..jobs import Described
from .code_names import LOCAL, Unsendable, is_of_a_pack, named, packs_named, qualified_name, reference
from .kinds import KINDS, Kind, Node, attributes_of, of_types, set_attributes

PLAIN = bool | int | float | str | None
RETURNED = ("list", "deque", "set", "dict", "object", "namespace", "random", "cell")  # what code of a pack may change
HYPERNETWORK = "comfy_extras.nodes_hypernetwork.load_hypernetwork_patch.<locals>.hypernetwork_patch"
MODULE_STATE = set(vars(nn.Module()))
DescribeLoaded = Callable[[Any, "Parts"], Node]
LoadAdditional = Callable[[Node], Any]


class Describer:
    """Describes values that are sent together. `model` is the MODEL that is sampled, to which they may refer.
    `describe_loaded` describes what ComfyUI has loaded from a file besides the MODEL's network. `known` are values that
    the other process has, by their numbers. Without `packs`, it takes no code of packs."""

    def __init__(
        self, model: ModelPatcher | None = None, describe_loaded: DescribeLoaded | None = None,
        known: dict[int, Any] | None = None, *, packs: bool = True,
    ) -> None:  # fmt: skip
        self.model = model
        self._takes_packs = packs
        self.describe_loaded = describe_loaded
        self.emptied: set[int] = set()  # the ids of cells whose contents each run makes anew
        self.tensors: dict[str, Tensor] = {}
        self.packs: dict[str, None] = {}  # PACK@FINGERPRINT of the code that is named
        self.code: list[Any] = []  # functions and objects of packs
        self.vaes: list[VAE] = []  # that encode during the run
        self.names_network = False  # is a part of the sampled network among the values?
        self._values = dict(known or {})  # by number; alive, so that no other value gets the id of one
        self._numbers = {id(value): number for number, value in self._values.items()}
        self._next_number = max(self._values, default=-1) + 1

    def describe(self, value: Any, what: str, *, of_pack: bool = False) -> Any:
        """Describes `value`, a pack's if `of_pack`. Raises Unsendable, naming `what`, for what cannot be sent."""
        numbers, tensors = len(self._numbers), len(self.tensors)
        try:
            return self.node(value, Parts(self, what, (), of_pack))
        except Unsendable:  # the worker will make none of its parts
            for known, before in ((self._numbers, numbers), (self.tensors, tensors)):
                while len(known) > before:
                    known.popitem()
            raise

    @functools.cached_property
    def network_paths(self) -> dict[int, str]:
        """The paths of the modules of the sampled network, by id."""
        network = getattr(self.model and self.model.model, "diffusion_model", None)
        if network is None:
            return {}
        network = vars(network).get("network", network)  # of a MODEL without weights
        paths = {id(module): path for path, module in network.named_modules()}
        for replaced in self.model.object_patches.values() if self.model else ():  # in their place, if that is loaded
            for module in replaced.modules() if isinstance(replaced, nn.Module) else ():
                paths.pop(id(module), None)
        return paths

    def described(self, values: dict[Any, Any]) -> Described:
        """Returns what this describer has made of several values, in this order, as one dict."""
        items = [[name, node] for name, node in values.items()]
        return Described({"kind": "dict", "type": "dict", "items": items}, self.tensors)

    def node(self, value: Any, of: Parts) -> Any:
        """Describes one part of a value."""
        if isinstance(value, Number) and not isinstance(value, Enum):
            value = getattr(value, "item", lambda: value)()  # numpy's numbers have one
        if isinstance(value, PLAIN) and not isinstance(value, Enum):
            return value
        if id(value) in self._numbers:
            return {"kind": "same", "number": self._numbers[id(value)]}
        if id(value) in of.around:
            raise Unsendable("unsendable.loop", what=of.what, thing=qualified_name(value))
        of_pack = of.of_pack or _is_code_of_a_pack(value)
        kind, row = next((name, row) for name, row in ALL_KINDS.items() if row.fits(value))
        node = {"kind": kind, **row.describe(value, Parts(self, of.what, (*of.around, id(value)), of_pack))}
        for name in (node.get("name"), node.get("class"), *node.get("bases", ())):
            if packs := packs_named(str(name)):
                if not self._takes_packs:
                    raise Unsendable("unsendable.foreign", what=of.what, thing=str(name))
                self.packs |= dict.fromkeys(packs)
        if _is_code_of_a_pack(value):
            self.code.append(value)
        number = self._numbers[id(value)] = self._next_number
        self._values[number] = value
        self._next_number += 1
        return {**node, "number": number, "returned": of_pack and kind in RETURNED}

    def take_back(self, changes: Described) -> None:
        """Gives the lists, dicts and objects of packs what the run has left in them."""
        for number, contents in Rebuilder(changes.tensors, made=self._values)(changes.tree).items():
            value = self._values[number]
            if isinstance(value, list | deque):
                value.clear()
                value.extend(contents)
            elif isinstance(value, set | dict):
                value.clear()
                value.update(contents)
            else:
                set_attributes(value, contents)


def _is_code_of_a_pack(value: Any) -> bool:
    """Is this a function or object of a pack, or a SAMPLER with a function of one?"""
    value = getattr(value, "sampler_function", value)
    while isinstance(value, functools.partial):
        value = value.func
    return is_of_a_pack(value)


@dataclass(frozen=True)
class Parts:
    """Describes the parts of `what`. `around`: ids of the values around them, one of a pack if `of_pack`."""

    describer: Describer
    what: str
    around: tuple[int, ...]
    of_pack: bool

    def __call__(self, part: Any) -> Any:
        return self.describer.node(part, self)

    def each(self, parts: Iterable[Any]) -> list[Any]:
        return [self(part) for part in parts]


class Rebuilder:
    """Makes again what one Describer has described. `load_additional` loads models that it has described by a file;
    `patcher` is this process's MODEL for the one that is sampled; `made` are values that it has, by their numbers."""

    def __init__(
        self, tensors: dict[str, Tensor], load_additional: LoadAdditional | None = None,
        patcher: ModelPatcher | None = None, made: dict[int, Any] | None = None,
    ) -> None:  # fmt: skip
        self.tensors: dict[str, Tensor] = tensors
        self.patcher = patcher
        self._load_additional = load_additional
        self._made = dict(made or {})
        self._before: dict[int, Any] = {}  # by number: the state of what code of packs may change

    def __call__(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self(part) for part in node]
        if not isinstance(node, dict):
            return node
        if node["kind"] == "same":
            return self._made[node["number"]]
        made = ALL_KINDS[node["kind"]].rebuild(node, self)
        if "number" in node:
            self._made[node["number"]] = made
            if node["returned"]:
                self._before[node["number"]] = _state(_contents(made))
        return made

    def load(self, file: Node) -> Any:
        if self._load_additional is None:
            raise Refused("patch.place", path=file["path"])
        return self._load_additional(file)

    def changes(self) -> tuple[Described, list[str]]:
        """Describes what lists, dicts and objects of packs have in them by now, by their numbers, where that has
        changed; and says why some cannot be described."""
        describer = Describer(self.patcher, known=self._made)
        changed, lost = {}, []
        for number, before in self._before.items():
            contents = _contents(self._made[number])
            now = _state(contents)
            if len(now) != len(before) or not all(map(_is_same, before, now)):
                try:
                    changed[number] = describer.describe(contents, qualified_name(type(self._made[number])))
                except Unsendable as reason:
                    lost.append(str(reason))
        return describer.described(changed), lost


def rebuild(described: Described, load_additional: LoadAdditional | None = None) -> Any:
    return Rebuilder(described.tensors, load_additional)(described.tree)


def described_plainly(value: dict[Any, Any]) -> Described:
    """Describes a dict of plain values."""
    describer = Describer()
    return describer.described({key: describer.describe(part, str(key)) for key, part in value.items()})


def _contents(made: Any) -> Any:
    """Returns what is in a list, set or dict, or the attributes of an object, as a new list or dict."""
    if isinstance(made, list | deque | set | frozenset):
        return list(made)
    return dict(made) if isinstance(made, dict) else attributes_of(made)


def _state(contents: list[Any] | dict[Any, Any]) -> list[tuple[Any, Any, float]]:
    items = enumerate(contents) if isinstance(contents, list) else contents.items()
    return [(key, value, _version(value)) for key, value in items]


def _is_same(before: tuple[Any, Any, float], now: tuple[Any, Any, float]) -> bool:
    (key, value, version), (other_key, other, other_version) = before, now
    same = value is other or (isinstance(value, PLAIN) and type(value) is type(other) and value == other)
    return key == other_key and same and version == other_version


def _version(value: Any) -> float:
    if not isinstance(value, Tensor):
        return 0
    return float(value.detach().double().sum()) if value.is_inference() else value._version


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
    loaded: Any = make.load(node["file"])
    if node["file"]["kind"] == "hypernetwork":
        return type(loaded)(loaded.hypernet, node["file"]["strength"])
    if node["file"]["kind"] != "control_net":
        return loaded.model if node["network_alone"] else loaded
    # A ControlNet is made for one run, so that nothing is left of another one's hint.
    made = loaded.copy()
    vars(made).update(make(node["settings"]))
    made.cond_hint_original = make(node["image"]).movedim(-1, 1)
    made.extra_concat_orig = make(node["masks"])
    made.vae = make(node["vae"])
    made.previous_controlnet = make(node["previous"])
    return made


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
    "sampling": Kind(
        lambda value: isinstance(value, nn.Module) and hasattr(value, "percent_to_sigma"),
        _describe_sampling,
        _rebuild_sampling,
    ),
    "network": Kind(of_types(nn.Module), _describe_network, _rebuild_network),
}
ALL_KINDS = MODEL_KINDS | KINDS


def controls_of(conds: dict[str, Any]) -> list[ControlBase]:
    """Returns all ControlNets of these conditions, each once, with those that they are chained to."""
    controls: dict[ControlBase, None] = {}
    for control in (cond.get("control") for prompt in conds.values() for cond in prompt):
        while control is not None:
            controls[control] = None
            control = control.previous_controlnet
    return list(controls)
