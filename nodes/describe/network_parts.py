"""The parts of a network, its modules and ComfyUI's plain objects in them, and what attributes they have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import comfy.ops
from torch import Tensor, nn

from ...parallel_runtime.loading.code_names import is_comfyui, qualified_name
from ...parallel_runtime.loading.object_codec import PLAIN
from .foreign_code import code_on

NETWORK, LATENT_FORMAT = "diffusion_model", "latent_format"
CACHED = "_cached"  # ends the names of what a forward keeps for longer sequences


@dataclass(frozen=True, kw_only=True)
class KnownPart:
    """A module, or a plain object of ComfyUI's in one: its class, and the names of its attributes and children, of them
    those that are plain with their values, and those that are tensors."""

    kind: str
    names: frozenset[str]
    code: frozenset[str]  # those with code of packs
    values: dict[str, Any]
    tensors: tuple[str, ...]


def parts_of(latent_format: Any, network: nn.Module) -> dict[str, KnownPart]:
    """Returns the parts of a network and its LatentFormat as they are now, by path."""
    return {path: _part(owner) for path, owner in named_parts(latent_format, network)}


def named_parts(latent_format: Any, network: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields by path a LatentFormat and the parts of its network."""
    yield LATENT_FORMAT, latent_format
    yield from parts_within(network, NETWORK)


def parts_within(network: nn.Module, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields all modules of a network, and ComfyUI's own objects that are their attributes."""
    for path, module in network.named_modules(prefix=prefix):
        yield path, module
        values = vars(module)
        kinds: set[Any] = {*map(type, values.values())}  # a few, which are quicker to look at than all values
        if own := {*filter(_has_attributes, kinds)}:
            yield from ((f"{path}.{name}", value) for name, value in values.items() if type(value) in own)


@functools.cache
def _has_attributes(kind: type) -> bool:
    return is_comfyui(kind) and not issubclass(kind, nn.Module | Tensor) and hasattr(kind, "__dict__")


def _part(owner: Any) -> KnownPart:
    own = {name: value for name, value in vars(owner).items() if not is_bookkeeping(name)}
    return KnownPart(
        kind=kind_of(owner),
        names=frozenset(all_attributes(owner)),
        code=frozenset(code_on(owner)),
        values={name: value for name, value in own.items() if is_plain(value)},
        tensors=tuple(name for name, value in own.items() if isinstance(value, Tensor)),
    )


def all_attributes(owner: Any) -> dict[str, Any]:
    """Returns the attributes of an object, and a module's parameters, buffers and children among them."""
    values = vars(owner)
    registered = (values.get(kind, {}) for kind in ("_parameters", "_buffers", "_modules"))
    return {**values, **{name: value for each in registered for name, value in each.items()}}


_class_name: Callable[[type], str] = functools.cache(qualified_name)


def kind_of(owner: Any) -> str:
    """Returns the name of the object's class."""
    return _class_name(type(owner))


def is_plain(value: Any) -> bool:
    """Is this a plain value, or a list or the like of such? An empty one may be a cache."""
    if isinstance(value, list | tuple | set | frozenset):
        return bool(value) and all(map(is_plain, value))
    if isinstance(value, dict):
        return bool(value) and all(map(is_plain, (*value, *value.values())))
    return isinstance(value, PLAIN)


@functools.cache
def is_bookkeeping(name: str) -> bool:
    """Is this an attribute that loading or computing sets?"""
    own = name in vars(comfy.ops.CastWeightBiasOp) or name.startswith(("comfy_", "prev_comfy_"))
    return own or name == "training" or name.endswith(CACHED)
