"""A MODEL by the loader node of a pack, or any other node, which is called as ComfyUI's executor does: in each worker
with the inputs that it had in ComfyUI. Samples of the weights tell whether it has made the same MODEL."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import comfy.utils
import folder_paths
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher
from torch import nn
from torch.utils._pytree import tree_leaves

from ..errors import Refused
from .code_names import is_of_a_pack, qualified_name
from .fingerprint import fingerprint, stored_samples
from .mapped import Backup, Kind, calls_loader, with_views


def load_by_node(kind: type[Kind], node: Any, inputs: dict[str, Any]) -> list[Kind]:
    """Calls a node, and returns the MODELs among what it gives, as `kind`s of patcher."""
    v3 = hasattr(node, "GET_SCHEMA")
    with calls_loader(kind):
        made = node.execute(**inputs) if v3 else getattr(node(), node.FUNCTION)(**inputs)
    leaves = tree_leaves(made.args if v3 else made)
    return [
        with_views(_as_kind(kind, one))
        for one in leaves
        if isinstance(one, ModelPatcher) and isinstance(one.model, BaseModel)
    ]


def load_same(kind: type[Kind], node: Any, call: dict[str, Any], expected: str) -> Kind:
    """Returns the MODEL of a node's `call` whose fingerprint is `expected`. Raises Refused where it gives none."""
    for name, paths in call["folders"].items():
        known = folder_paths.folder_names_and_paths.setdefault(name, ([], set()))[0]
        if isinstance(known, list):
            known[:] = paths  # in place: packs share these lists
    try:
        models = load_by_node(kind, node, call["inputs"])
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError) as error:
        raise Refused("loader.fails", node=qualified_name(node), error=f"{type(error).__name__}: {error}") from error
    for model in models:
        if network_fingerprint(model) == expected:
            return model
    raise Refused("loader.other", node=qualified_name(node))


def network_fingerprint(model: ModelPatcher) -> str:
    """Fingerprints a MODEL or CLIP as its loader has made it: its class if that is a pack's, the classes of its layers,
    and samples of the weights as they are without patches, in the dtype that ComfyUI's loader copies them into."""
    backup = {name: kept.weight for name, kept in model.backup.items()}
    backup |= {name: weight for name, (weight, _) in model.hook_backup.items()}
    path = "diffusion_model" if isinstance(model.model, BaseModel) else ""
    modules = dict(model.model.get_submodule(path).named_modules(prefix=path))
    for name, before in model.object_patches_backup.items():
        modules |= dict(before.named_modules(prefix=name)) if isinstance(before, nn.Module) else {}
    classes = [qualified_name(one) for one in type(model).__mro__ if is_of_a_pack(one)]
    layers = [f"{path} {qualified_name(type(one))}" for path, one in modules.items()]
    samples = (
        sample
        for path, module in modules.items()
        for name, weight in _stored(module)
        for sample in stored_samples(
            backup.get(f"{path}.{name}", weight), getattr(module, f"{name}_comfy_model_dtype", None)
        )
    )
    return fingerprint(*classes, *layers, *samples)[:32]


def _stored(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields a module's own parameters, and those of its buffers that files have."""
    for name, weight in sorted((module._parameters | module._buffers).items()):  # dynamic VRAM has another order
        if weight is not None and name not in module._non_persistent_buffers_set and not weight.is_meta:
            yield name, weight


def _as_kind(kind: type[Kind], model: Any) -> Kind:
    """Makes the loaded MODEL a `kind`, if it is not already, which keeps what a pack's class does otherwise."""
    if not isinstance(model, kind):
        kinds: tuple[Any, Any] = (kind, type(model))
        model.__class__ = kind if kinds[1] is ModelPatcher else _kind_of_pack(*kinds)
    return model


@cache
def _kind_of_pack(kind: Any, of_pack: Any) -> Any:
    class OfPack(kind, of_pack):
        """Patches weights as the pack does; the weights themselves are not moved."""

        mmap_released = True  # else ComfyUI-GGUF copies what is mapped

        def clone(self, *args: Any, **kwargs: Any) -> Any:
            made = kind.clone(self, *args, **kwargs)
            made.__class__ = OfPack  # the pack makes one of its own class
            return made

        def patch_weight_to_device(self, key: str, *args: Any, **kwargs: Any) -> Any:
            """Copies the weight's tensor object first: ComfyUI-GGUF writes patches onto it, beside its bytes."""
            if key in self.patches:
                weight = comfy.utils.get_attr(self.model, key)
                self.backup.setdefault(key, Backup(weight, False))
                comfy.utils.set_attr_param(self.model, key, copy.copy(weight))
            return super().patch_weight_to_device(key, *args, **kwargs)

    return OfPack
