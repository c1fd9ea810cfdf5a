"""Evaluates a network in the workers for a sampler that runs in ComfyUI's own process."""

from __future__ import annotations

from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from torch.utils._pytree import tree_map_only

from ...parallel_runtime.errors import Refused
from ...parallel_runtime.jobs import EvaluationJob
from ...parallel_runtime.planning.network_stats import Work
from ...parallel_runtime.planning.run_plan import RunPlan
from ...parallel_runtime.request import ParallelRequest
from ..describe.input_checks import FULL_RUN_OPTIONS
from ..describe.model_patches import check_attributes, check_weight_sizes, describe_transformer_options
from ..describe.pre_encoding import latent_size
from ..describe.sampling_job import Source, couples_by_masks, describe_model, network_couples_batch
from ..describe.shared_state import check_state
from .comfy_memory import GroupModel
from .lease import lease_with_plan


class RemoteEvaluation:
    """The Evaluation of a RemoteModelPatcher: each call is one request to the workers."""

    def __init__(self, request: ParallelRequest) -> None:
        self._request = request
        self._source: Source | None = None  # the MODEL, from ComfyUI's `pre_run` to its `cleanup`
        self._model: GroupModel | None = None  # the workers' model at the last evaluation
        self._plans: dict[tuple[Work, bool], RunPlan] = {}  # this run's plans by work and batch_coupled

    def begin(self, model: ModelPatcher) -> None:
        """Describes MODEL for the evaluations that follow. Raises Refused where no worker could have its network."""
        for name, off in FULL_RUN_OPTIONS.items():
            if (value := self._request.values[name]) > off:
                raise Refused("loader.runs", name=name, value=f"{value:g}", without=off)
        if model.hook_patches or model.forced_hooks:
            raise Refused("model.hooks")
        check_weight_sizes(model)
        check_attributes(model)
        check_state(model, model.model_options)
        self._source = describe_model(model, self._request)

    def __call__(self, method: str, arguments: dict[str, Any]) -> Any:
        """Returns the network's result for these arguments, on the device of the first one. Raises Refused."""
        if self._source is None:
            raise Refused("loader.called")
        each, conds = _split_arguments(arguments, method)
        options = arguments.get("transformer_options")
        result = self._evaluate(self._source, method, each, conds, options)
        like = next(iter(arguments.values()))
        device = (like[0] if isinstance(like, list) else like).device
        return tree_map_only(torch.Tensor, lambda part: part.to(device), result)

    def _evaluate(
        self, source: Source, method: str, each: dict[str, Any], conds: dict[str, Any], options: dict[str, Any] | None
    ) -> Any:
        masks = (value for name, value in conds.items() if name.endswith("denoise_mask"))
        batch_coupled = network_couples_batch(source.network, options or {})
        batch_coupled = batch_coupled or source.images_coupled or couples_by_masks(source.network, *masks)
        shape, text = _sizes(each, conds)
        work = source.work(shape, text)
        job = EvaluationJob(
            call_arguments=each,
            options=None
            if options is None
            else describe_transformer_options(options, latent_size(source.network, shape)),
            conds=conds,
            weight_patches=source.weight_patches,
            batch_coupled=batch_coupled,
            method=method,
        )
        inputs, sizes = source.inputs(self._request, work, batch_coupled=batch_coupled), (work, batch_coupled)
        with lease_with_plan(source.spec, inputs, previous=self._model, plan=self._plans.get(sizes)) as (lease, plan):
            self._model, self._plans[sizes] = lease.loaded, plan
            return lease.run(plan, job).value["out"]

    def end(self) -> None:
        """Applies the request's after_sampling to the model, and forgets the run."""
        if self._model is not None:
            self._model.evict_conditions()
            self._model.end_run(self._request.after_sampling)
        self._source = self._model = None
        self._plans = {}


def _split_arguments(arguments: dict[str, Any], method: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments that change with each call (latent, timestep, ControlNet residuals), and the conditions."""
    present = {key: value for key, value in arguments.items() if value is not None and key != "transformer_options"}
    changing = [*present][:2] if method == "forward" else []
    each = {key: value for key, value in present.items() if key in (*changing, "control")}
    return each, {key: value for key, value in present.items() if key not in each}


def _sizes(each: dict[str, Any], conds: dict[str, Any]) -> tuple[tuple[int, ...], int]:
    """Returns the shape of the first latent, and the number of text tokens."""
    latent = next(iter(each.values()), None)
    latent = latent[0] if isinstance(latent, list) else latent
    text = next((value for value in conds.values() if torch.is_tensor(value) and value.ndim == 3), None)
    shape = (1, 1, 1, 1) if latent is None else tuple(latent.shape)
    return shape, 0 if text is None else text.shape[1]
