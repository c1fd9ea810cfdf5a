"""A MODEL of ComfyUI's whose network is evaluated elsewhere: the same MODEL in all else, its weights left alone.

Wrappers around the network, ControlNets, guiders and samplers run in this process, as they do on any MODEL.
"""

from __future__ import annotations

import copy
import inspect
import uuid
from typing import Any, Protocol

import comfy.model_management
import torch
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher
from torch import nn

from .compiling import COMPILE_KEY, leave_eager
from .residence import CPU, Hollow
from .tampering import check_module, check_network

INNER = "_forward"  # what ComfyUI's networks call inside the wrappers around them
METHODS = ("preprocess_text_embeds",)  # of a network, that code outside of it calls


class Evaluation(Protocol):
    """What answers for the network."""

    def begin(self, model: ModelPatcher) -> None: ...

    def __call__(self, method: str, arguments: dict[str, Any]) -> Any: ...

    def settle(self) -> None: ...


class Weightless(Hollow):
    """What nodes put in place of MODEL's parts counts, as on any MODEL; only the network is not here."""

    evaluation: Evaluation

    def clone(self, *args: Any, **kwargs: Any) -> Weightless:
        made = super().clone(*args, **kwargs)
        made.evaluation = self.evaluation
        return made

    def add_wrapper_with_key(self, wrapper_type: str, key: str, wrapper: Any) -> None:
        """A compiled network would run here; what is to be compiled is read off the model options."""
        if key != COMPILE_KEY:
            super().add_wrapper_with_key(wrapper_type, key, wrapper)

    def partially_load(self, device_to: torch.device, extra_memory: int = 0, force_patch_weights: bool = False) -> int:
        self.unpatch_model(unpatch_weights=False)  # what another clone put there
        self.patch_model(load_weights=False)
        return super().partially_load(device_to, extra_memory, force_patch_weights)

    def model_patches_models(self) -> list[ModelPatcher]:
        """They run where the network does."""
        return []

    def pre_run(self) -> None:
        super().pre_run()
        self.evaluation.begin(self)

    def cleanup(self) -> None:
        """ComfyUI is done with the MODEL for now."""
        super().cleanup()
        self.evaluation.settle()

    def detach(self, unpatch_all: bool = True) -> torch.nn.Module:
        if unpatch_all:
            self.unpatch_model(unpatch_weights=False)
        return super().detach(unpatch_all)


def weightless(model: ModelPatcher, evaluation: Evaluation) -> Weightless:
    """A clone of `model` with `evaluation` for its network. Its weights are neither copied nor moved."""
    made: Any = model.clone()
    made.__class__ = Weightless
    made.evaluation = evaluation
    leave_eager(made)
    made.model = _without_network(model.model, evaluation)
    made.size = 1  # the workers' memory is counted apart, see residence.py
    made.load_device, made.offload_device = comfy.model_management.get_torch_device(), CPU
    made.parent = None
    made.backup, made.backup_buffers, made.object_patches_backup, made.pinned = {}, {}, {}, set()
    made.clone_base_uuid = uuid.uuid4()
    return made


def network_behind(model: ModelPatcher) -> nn.Module:
    """MODEL's real network, also where something stands in for it."""
    return _real(model.model.diffusion_model)


def _without_network(model: BaseModel, evaluation: Evaluation) -> BaseModel:
    made = copy.copy(model)
    made._modules = dict(model._modules)
    made.__dict__["model_loaded_weight_memory"] = 0
    made.current_weight_patches_uuid = None
    made.device = CPU
    made.current_patcher = None
    # How prompts are batched must not depend on what ComfyUI's own device has free: nothing is computed there.
    made.memory_required = lambda *args, **kwargs: 0
    made.diffusion_model = stand_in(_real(model.diffusion_model), evaluation)
    return made


def _real(network: nn.Module) -> nn.Module:
    return vars(network).get("network", network)


def stand_in(network: nn.Module, evaluation: Evaluation) -> nn.Module:
    """A copy of `network` that shares everything with it, and has `evaluation` do its work."""
    kind = type(network)
    replaced = [name for name in METHODS if hasattr(kind, name)]
    replaced.append(INNER if hasattr(kind, INNER) else "forward")
    members = {name: _asking(kind, name, evaluation) for name in replaced}
    made = copy.copy(network)
    made.__class__ = type(kind.__name__, (kind,), members)
    made.__dict__["network"] = network
    return made


def _asking(kind: type, name: str, evaluation: Evaluation) -> Any:
    """The method `name` that asks `evaluation`, with the arguments' names: those of `forward`, which workers call."""
    signature = inspect.signature(getattr(kind, name))
    more = {key for key, parameter in signature.parameters.items() if parameter.kind is parameter.VAR_KEYWORD}
    asked = "forward" if name == INNER else name
    called = list(inspect.signature(getattr(kind, asked)).parameters)
    names = {own: own if own in called else called[place] for place, own in enumerate(signature.parameters)}

    def ask(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        check_network(vars(self)["network"])  # what calls this may have changed it a moment ago
        check_module(self, kind.__name__)
        arguments: dict[str, Any] = {}
        for key, value in list(signature.bind(self, *args, **kwargs).arguments.items())[1:]:
            arguments.update(value if key in more else {names[key]: value})
        return evaluation(asked, arguments)

    return ask
