"""A MODEL without weights in this process, whose network is evaluated in the workers.

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

from .foreign_code import check_module, check_network
from .refused_event import announce_refusals
from .torch_compile import COMPILE_KEY, remove_compile

CPU = torch.device("cpu")
INNER_FORWARD = "_forward"  # ComfyUI's networks call this method inside the wrappers around them
METHODS = ("preprocess_text_embeds",)  # methods of a network that code outside of it calls


class Evaluation(Protocol):
    """Computes in place of the network, from ComfyUI's `pre_run` (`begin`) to its `cleanup` (`end`)."""

    def begin(self, model: ModelPatcher) -> None: ...

    def __call__(self, method: str, arguments: dict[str, Any]) -> Any: ...

    def end(self) -> None: ...


class WeightlessPatcher(ModelPatcher):
    """A ModelPatcher whose weights are in other processes: this one has nothing to move and nothing to patch."""

    def partially_load(self, device_to: torch.device, extra_memory: int = 0, force_patch_weights: bool = False) -> int:
        self.model.device = device_to
        return 0

    def partially_unload(self, device_to: torch.device, memory_to_free: int = 0, **_: Any) -> int:
        return 0

    def detach(self, unpatch_all: bool = True) -> torch.nn.Module:
        return self.model


class RemoteModelPatcher(WeightlessPatcher):
    """A MODEL whose network is remote. Object patches, hooks and wrappers on it work as on any MODEL."""

    evaluation: Evaluation

    def clone(self, *args: Any, **kwargs: Any) -> RemoteModelPatcher:
        made = super().clone(*args, **kwargs)
        made.evaluation = self.evaluation
        return made

    def add_wrapper_with_key(self, wrapper_type: str, key: str, wrapper: Any) -> None:
        """Drops the wrapper of torch.compile, which would compute here; the workers compile by the model options."""
        if key != COMPILE_KEY:
            super().add_wrapper_with_key(wrapper_type, key, wrapper)

    def partially_load(self, device_to: torch.device, extra_memory: int = 0, force_patch_weights: bool = False) -> int:
        self.unpatch_model(unpatch_weights=False)  # object patches of another clone
        self.patch_model(load_weights=False)
        return super().partially_load(device_to, extra_memory, force_patch_weights)

    def model_patches_models(self) -> list[ModelPatcher]:
        """Returns none: model patches run in the workers, with the network."""
        return []

    def pre_run(self) -> None:
        super().pre_run()
        with announce_refusals():
            self.evaluation.begin(self)

    def cleanup(self) -> None:
        """ComfyUI calls this at the end of a run."""
        super().cleanup()
        self.evaluation.end()

    def detach(self, unpatch_all: bool = True) -> torch.nn.Module:
        if unpatch_all:
            self.unpatch_model(unpatch_weights=False)
        return super().detach(unpatch_all)


def without_weights(model: ModelPatcher, evaluation: Evaluation) -> RemoteModelPatcher:
    """A clone of `model` with `evaluation` for its network. Its weights are neither copied nor moved."""
    made: Any = model.clone()
    made.__class__ = RemoteModelPatcher
    made.evaluation = evaluation
    remove_compile(made)
    made.model = _without_network(model.model, evaluation)
    made.size = 1  # nodes/remote/comfy_memory.py counts the workers' memory
    made.load_device, made.offload_device = comfy.model_management.get_torch_device(), CPU
    made.parent = None
    made.backup, made.backup_buffers, made.object_patches_backup, made.pinned = {}, {}, {}, set()
    made.clone_base_uuid = uuid.uuid4()
    return made


def native_network(model: ModelPatcher) -> nn.Module:
    """Returns MODEL's native network, also for a RemoteModelPatcher."""
    return _unwrap_remote(model.model.diffusion_model)


def _without_network(model: BaseModel, evaluation: Evaluation) -> BaseModel:
    made = copy.copy(model)
    made._modules = dict(model._modules)
    made.__dict__["model_loaded_weight_memory"] = 0
    made.current_weight_patches_uuid = None
    made.device = CPU
    made.current_patcher = None
    # ComfyUI batches prompts by the free memory of its own device, which computes nothing here.
    made.memory_required = lambda *args, **kwargs: 0
    made.diffusion_model = remote_network(_unwrap_remote(model.diffusion_model), evaluation)
    return made


def _unwrap_remote(network: nn.Module) -> nn.Module:
    return vars(network).get("network", network)


def remote_network(network: nn.Module, evaluation: Evaluation) -> nn.Module:
    """A copy of `network` that shares its modules and weights, and calls `evaluation` instead of computing."""
    kind = type(network)
    replaced = [name for name in METHODS if hasattr(kind, name)]
    replaced.append(INNER_FORWARD if hasattr(kind, INNER_FORWARD) else "forward")
    members = {name: _remote_method(kind, name, evaluation) for name in replaced}
    made = copy.copy(network)
    made.__class__ = type(kind.__name__, (kind,), members)
    made.__dict__["network"] = network
    return made


def _remote_method(kind: type, name: str, evaluation: Evaluation) -> Any:
    """Returns a method `name` that calls `evaluation` with arguments named as in `forward`, which workers call.

    Where `name` and `forward` name an argument differently, the unmatched names correspond in their order.
    """
    signature = inspect.signature(getattr(kind, name))
    more = {key for key, parameter in signature.parameters.items() if parameter.kind is parameter.VAR_KEYWORD}
    called = "forward" if name == INNER_FORWARD else name
    accepted = inspect.signature(getattr(kind, called)).parameters
    unmatched = (
        key for key, one in accepted.items() if key not in signature.parameters and one.kind != one.VAR_KEYWORD
    )
    names = {key: key if key in accepted else next(unmatched, key) for key in signature.parameters}

    def evaluate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with announce_refusals():
            check_network(vars(self)["network"])  # a sampler or guider may have changed it during this run
            check_module(self, kind.__name__)
        arguments: dict[str, Any] = {}
        for key, value in list(signature.bind(self, *args, **kwargs).arguments.items())[1:]:
            arguments.update(value if key in more else {names[key]: value})
        if "a_timestep" in arguments:  # LTX-2's `forward` takes one timestep for video and audio
            arguments["timestep"] = [arguments["timestep"], arguments.pop("a_timestep")]
        with announce_refusals():
            return evaluation(called, arguments)

    return evaluate
