"""A MODEL without weights in this process: each evaluation of its network is one request to the workers.

Wrappers around the network, ControlNets, guiders and samplers run in this process, as they do on any MODEL."""

from __future__ import annotations

import copy
import inspect
import sys
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, WrappersMP
from comfy.weight_adapter import WeightAdapterBase
from comfy_api.torch_helpers.torch_compile import COMPILE_KEY
from torch import nn
from torch.utils._pytree import tree_map, tree_map_only

from ...parallel_runtime.errors import Refused
from ...parallel_runtime.group.runtime import runtime
from ...parallel_runtime.jobs import Described, EvaluationJob, is_outer_method
from ...parallel_runtime.loading.object_codec import PLAIN, Describer
from ...parallel_runtime.planning.network_stats import Work
from ...parallel_runtime.planning.run_plan import RunPlan
from ...parallel_runtime.request import ParallelRequest
from ..describe import model_patches, sampling_job
from ..describe.foreign_code import check_network
from ..describe.host import announce_refusals
from ..describe.model import DescribedModel, describe_model
from .comfy_memory import CPU, GroupModel, WeightlessPatcher
from .lease import lease_with_plan

Objects = dict[int, tuple[Any, Described]]  # by id, alive so that no other object gets it, with its description
EvaluateCall = Callable[[str, dict[str, Any]], Any]  # evaluates a method of a network with these arguments


def without_weights(model: ModelPatcher, request: ParallelRequest) -> RemoteModelPatcher:
    """Returns a clone of `model` whose network the workers evaluate. Its weights are neither copied nor moved."""
    made: Any = model.clone()
    made.__class__ = RemoteModelPatcher
    made.evaluation = RemoteEvaluation(request)
    made.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, COMPILE_KEY)
    made.object_patches = model_patches.without_compiled(model)
    made.additional_models.pop(sampling_job.MULTIGPU, None)
    made.model = copy.copy(model.model)
    made.model._modules = dict(model.model._modules)
    made.model.__dict__["model_loaded_weight_memory"] = 0
    made.model.current_weight_patches_uuid = None
    made.model.device = CPU
    made.model.current_patcher = None
    # ComfyUI batches prompts by the free memory of its own device, which computes nothing here.
    made.model.memory_required = lambda *args, **kwargs: 0
    made.model.diffusion_model = remote_network(model_patches.native_network(model), made.evaluation)
    made.model.diffusion_model.__dict__["native"] = model_patches.native_model(model)
    made.size = 1  # comfy_memory.py counts the workers' memory
    made.load_device, made.offload_device = comfy.model_management.get_torch_device(), CPU
    made.parent = None
    made.backup, made.backup_buffers, made.object_patches_backup, made.pinned = {}, {}, {}, set()
    made.clone_base_uuid = uuid.uuid4()
    return made


class RemoteModelPatcher(WeightlessPatcher):
    """A MODEL whose network is remote. Object patches, hooks and wrappers on it work as on any MODEL."""

    evaluation: RemoteEvaluation

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
        for callback in self.get_all_callbacks(CallbacksMP.ON_DETACH):
            callback(self, unpatch_all)
        return super().detach(unpatch_all)


def remote_network(network: nn.Module, evaluation: EvaluateCall) -> nn.Module:
    """A copy of `network` that shares its modules and weights, and calls `evaluation` instead of computing."""
    kind = type(network)
    # ComfyUI's networks call `_forward` inside the wrappers around them.
    replaced = ["_forward" if hasattr(kind, "_forward") else "forward", *filter(is_outer_method, dir(kind))]
    members = {name: _remote_method(kind, name, evaluation) for name in replaced}
    made = copy.copy(network)
    made.__class__ = type(kind.__name__, (kind,), members)
    made.__dict__["network"] = network
    return made


def _remote_method(kind: type, name: str, evaluation: EvaluateCall) -> Any:
    """Returns a method `name` that calls `evaluation` with its arguments by name."""
    signature = inspect.signature(getattr(kind, name))
    more = {key for key, parameter in signature.parameters.items() if parameter.kind is parameter.VAR_KEYWORD}

    @announce_refusals()
    def evaluate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        check_network(vars(self)["network"], self)  # a sampler or guider may have changed it during this run
        arguments: dict[str, Any] = {}
        for key, value in list(signature.bind(self, *args, **kwargs).arguments.items())[1:]:
            arguments.update(value if key in more else {key: value})
        # Later versions repeat, around some networks, the addresses of the step before: of their allocations only.
        pause = getattr(sys.modules.get("comfy.model_prefetch"), "pause_malloc_graph", nullcontext)
        with pause():
            return evaluation(name, arguments)

    return evaluate


@dataclass(eq=False, repr=False)
class RemoteEvaluation:
    """Computes in place of a network, from ComfyUI's `pre_run` (`begin`) to its `cleanup` (`end`)."""

    _request: ParallelRequest
    _described: DescribedModel | None = None  # during a run
    _model: GroupModel | None = None  # the workers' model at the last evaluation
    _plans: dict[tuple[Work, bool], RunPlan] = field(default_factory=dict)  # this run's, by work and batch_coupled
    _objects: Objects = field(default_factory=dict)  # this run's

    def begin(self, model: ModelPatcher) -> None:
        """Describes MODEL for the evaluations that follow. Raises Refused where no worker could have its network."""
        if model.hook_patches or model.forced_hooks:
            raise Refused("model.hooks")
        for key, patches in model.patches.items():
            for _, value, *_ in patches:  # of another size by a LoRA, of which this process would read the old one
                if isinstance(value, WeightAdapterBase) and value.calculate_shape(key) is not None:
                    raise Refused("model.resized", key=key)
        replaced = model_patches.replaced_attributes(model) | model_patches.replaced_methods(model)
        if replaced:  # ComfyUI would set them on the network of this process
            raise Refused("model.replaced", names=", ".join(sorted(replaced)))
        model_patches.check_state(model, model.model_options)
        self._described = describe_model(model, self._request)

    def __call__(self, method: str, arguments: dict[str, Any]) -> Any:
        """Returns the network's result for these arguments, on the device of the first one. Raises Refused."""
        described = self._described
        assert described is not None, "a run has begun"
        each, conds = split_arguments(arguments, method)
        latent = next(iter(each.values()), None)
        latent = latent[0] if isinstance(latent, list) else latent
        shape = (1, 1, 1, 1) if latent is None else tuple(latent.shape)
        text = next((value.shape[1] for value in conds.values() if torch.is_tensor(value) and value.ndim == 3), 0)
        network, options = described.network, arguments.get("transformer_options")
        masks = (value for name, value in conds.items() if name.endswith("denoise_mask"))
        coupled = model_patches.network_couples_batch(network, options or {})
        batch_coupled = coupled or described.stats.images_coupled or model_patches.couples_by_masks(network, *masks)
        if options is not None:
            options, vaes = model_patches.describe_transformer_options(options)
            described = described.with_vaes(vaes, shape)
        work = described.work(shape, text)
        job = EvaluationJob(
            call_arguments=each, options=options, cond_arguments=with_described_objects(conds, self._objects),
            weight_patches=described.weight_patches, batch_coupled=batch_coupled, method=method,
        )  # fmt: skip
        inputs, sizes = described.inputs(self._request, work, batch_coupled=batch_coupled), (work, batch_coupled)
        plan = self._plans.get(sizes)
        with lease_with_plan(described.spec, inputs, previous=self._model, plan=plan, goes_on=True) as (lease, plan):
            self._model, self._plans[sizes] = lease.loaded, plan
            result = lease.run(plan, job).value["out"]
        like = next(iter(arguments.values()))
        device = (like[0] if isinstance(like, list) else like).device
        return tree_map_only(torch.Tensor, lambda part: part.to(device), result)

    def end(self) -> None:
        """Applies the request's after_sampling to the model, and forgets the run."""
        if self._model is not None:
            runtime.end_evaluations()
            self._model.free(self._request.after_sampling)
        self._described = self._model = None
        self._plans, self._objects = {}, {}


def split_arguments(arguments: dict[str, Any], method: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments that change with each call (latent, time, ControlNet residuals), and the conditions."""
    given = {key: value for key, value in arguments.items() if key != "transformer_options"}
    changing = [] if is_outer_method(method) else [*[*given][:2], "a_timestep", "control"]  # LTX-2 has one for audio
    each = {key: value for key, value in given.items() if key in changing}
    return each, {key: value for key, value in given.items() if key not in each}


def with_described_objects(conds: dict[str, Any], known: Objects) -> dict[str, Any]:
    """Returns conditions with ComfyUI's objects in them (MiniMax H3's layout) described, each once for all evaluations
    that share `known`: those that are sent are compared with the last ones. Raises Unsendable."""

    def described(part: Any) -> Any:
        if isinstance(part, (torch.Tensor, *PLAIN.__args__)):
            return part
        if id(part) not in known:
            parts = Describer(packs=False)
            known[id(part)] = part, Described(parts.describe(part, "the CONDITIONING"), parts.tensors)
        return known[id(part)][1]

    made: dict[str, Any] = tree_map(described, conds)
    return made
