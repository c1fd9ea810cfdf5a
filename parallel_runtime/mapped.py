"""Models loaded by ComfyUI's own loaders, with weights that stay views of the mapped file. Knows no worker.

ComfyUI builds what `comfy.model_patcher.CoreModelPatcher` names, and has weights assigned instead of copied where that
class says it is dynamic: its main.py replaces the same attribute. Nothing else of ComfyUI is touched.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import comfy.model_patcher
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from torch import Tensor

Kind = TypeVar("Kind", bound="Mapped")
Backup = namedtuple("Backup", ["weight", "inplace_update"])  # as ComfyUI's, which has no name


class Mapped(ModelPatcher):
    """A static ModelPatcher whose copy in main memory is the file's pages: unloading drops the device's, moves nothing.

    `own` maps names of parameters to these views, for all clones together. Where the file holds another dtype than
    ComfyUI would, they are cast on the device, or as they are used.
    """

    own: dict[str, Tensor]
    _assigning = False

    def is_dynamic(self) -> bool:
        return Mapped._assigning

    def clone(self: Kind, *args: Any, **kwargs: Any) -> Kind:
        made = super().clone(*args, **kwargs)
        made.own = self.own
        return made

    def load(self, device_to: torch.device | None = None, *args: Any, **kwargs: Any) -> None:
        super().load(device_to, *args, **kwargs)
        for module in self.model.modules():
            self.settle(module)

    def settle(self, module: torch.nn.Module) -> None:
        """Give the module's own weights, which are where they shall be, the dtype that they are computed from."""
        for name in _uncast(module):
            if not _casts_as_it_computes(module, name):
                _cast(module, name)

    def patch_weight_to_device(self, key: str, *args: Any, **kwargs: Any) -> Any:
        """A weight that patches change has the dtype that ComfyUI would have merged them into."""
        if key in self.patches:
            path, _, name = key.rpartition(".")
            module = self.model.get_submodule(path)
            if name in _uncast(module):
                _cast(module, name)
        return super().patch_weight_to_device(key, *args, **kwargs)

    def unpatch_model(self, device_to: torch.device | None = None, unpatch_weights: bool = True) -> None:
        super().unpatch_model(None if unpatch_weights else device_to, unpatch_weights)
        if unpatch_weights and device_to is not None:
            for name, view in self.own.items():
                comfy.utils.set_attr_param(self.model, name, view)
            self.model.to(device_to)  # buffers
            self.model.device = device_to


def load_mapped(kind: type[Kind], load: Callable[..., Any], arguments: Sequence[Any], index: int | None) -> Kind:
    """The `kind` that `load(*arguments)` makes, or the one at `index` of what it makes.

    Formats that a loader holds in wrappers of its own (quantised, GGUF) stay as it made them.
    """
    with _assigned(kind):
        made = load(*arguments)
    patcher: Kind = made if index is None else made[index]
    # Not `.data`, which is of a wrapper's class without what makes it one.
    patcher.own = {name: parameter.detach() for name, parameter in patcher.model.named_parameters()}
    return patcher


@contextmanager
def _assigned(kind: type[Mapped]) -> Iterator[None]:
    before = comfy.model_patcher.CoreModelPatcher
    comfy.model_patcher.CoreModelPatcher, Mapped._assigning = kind, True
    try:
        yield
    finally:
        comfy.model_patcher.CoreModelPatcher, Mapped._assigning = before, False


def _uncast(module: torch.nn.Module) -> list[str]:
    """The plain parameters that have another dtype than ComfyUI's loader would have copied them into."""
    return [
        name
        for name, parameter in module._parameters.items()
        if parameter is not None
        and type(parameter.data) is Tensor
        and parameter.dtype.is_floating_point
        and getattr(module, f"{name}_comfy_model_dtype", parameter.dtype) != parameter.dtype
    ]


def _casts_as_it_computes(module: Any, name: str) -> bool:
    """On the CPU, where the file's pages are the weights: a layer of ComfyUI can widen them each time, to the bit."""
    parameter, wanted = module._parameters[name], getattr(module, f"{name}_comfy_model_dtype")
    widens = wanted.itemsize > parameter.dtype.itemsize
    if parameter.device.type != "cpu" or not hasattr(module, "comfy_cast_weights") or not widens:
        return False
    module.comfy_cast_weights = True
    return True


def _cast(module: Any, name: str) -> None:
    """To the dtype that ComfyUI's loader would have copied it into."""
    value = module._parameters[name].data.to(getattr(module, f"{name}_comfy_model_dtype"))
    module._parameters[name] = torch.nn.Parameter(value, requires_grad=False)
