"""Evaluations for samplers that run in ComfyUI's own process: the network is in the workers, the loop is not."""

from __future__ import annotations

import weakref
from typing import Any

import comfy.model_management
import torch
from comfy.model_base import BaseModel
from torch import Tensor

from ..parallel_runtime.errors import Refused
from ..parallel_runtime.host.cost import activation_bytes, work_of
from ..parallel_runtime.host.group import WorkerGroup
from ..parallel_runtime.host.runtime import borrowed_group
from ..parallel_runtime.specs import EvaluationJob, ModelSpec, ParallelRequest
from .describe import describe_file
from .refusals import check_call, check_weights
from .remote import comfy_setup, plan_for
from .residence import residence

KEEP = 8  # prompts that a worker keeps: see worker/comfy_loop/evaluation.py


class Prompts:
    """Which conditions the workers of a group have, by number."""

    def __init__(self) -> None:
        self._next = 0
        self._sent: list[tuple[int, dict[str, Any]]] = []

    def find(self, conds: dict[str, Any]) -> int | None:
        return next((number for number, sent in self._sent if _equal(sent, conds)), None)

    def add(self, conds: dict[str, Any]) -> int:
        self._next += 1
        self._sent = [*self._sent, (self._next, conds)][-KEEP:]
        return self._next

    def forget(self) -> None:
        self._sent = []


_prompts: weakref.WeakKeyDictionary[WorkerGroup, Prompts] = weakref.WeakKeyDictionary()


class RemoteEvaluation:
    """A stand-in's `evaluate`: one round trip to the worker group."""

    def __init__(self, request: ParallelRequest) -> None:
        self._request = request
        self.model: weakref.ref[BaseModel] | None = None  # known once the model that we stand in is built
        self._used: ModelSpec | None = None

    def __call__(self, x: Tensor, timestep: Tensor, conds: dict[str, Any]) -> Tensor:
        """ComfyUI's model output [B, C_out, (T,) H, W], in x's dtype and on x's device. Raises Refused."""
        if self._request.step_cache:
            raise Refused(
                f"step_cache {self._request.step_cache:g} on CP Load Diffusion Model: evaluations for a native sampler "
                "do not say where a run begins; sample with a CP Sampler, or set step_cache to 0 here"
            )
        assert self.model is not None
        model = self.model()
        assert model is not None
        check_weights(model.current_patcher)
        spec, family, patches = describe_file(model.current_patcher, self._request.dtype)
        conds = {name: value for name, value in conds.items() if value is not None}
        if unused := sorted(conds.keys() - family.conditions):
            raise Refused(
                f"a {family.name} model in the workers cannot honour {', '.join(unused)} in the "
                "CONDITIONING; remove it, or take the model from Load Diffusion Model"
            )
        check_call(f"a {family.name} model in the workers", family, tuple(x.shape), conds)
        _, placement = plan_for(family, self._request)
        check = comfy.model_management.throw_exception_if_processing_interrupted
        text = conds.get("c_crossattn")
        work = work_of(spec, family, tuple(x.shape), 0 if text is None else text.shape[1])
        with borrowed_group(placement, comfy_setup(), check) as group:
            parallelism, _ = plan_for(family, self._request, work=work)
            if not group.holds(spec) or spec != self._used:
                residence.claim(group, spec, work.weight_bytes, activation_bytes(work, parallelism))
            self._used = spec
            prompts = _prompts.setdefault(group, Prompts())
            known = prompts.find(conds)
            job = EvaluationJob(
                x=x,
                timestep=timestep,
                prompt=prompts.add(conds) if known is None else known,
                conds=conds if known is None else None,
                patches=None if group.holds(spec) else patches,
            )
            try:
                result = group.sample(spec, parallelism, job, watch=check)
            except BaseException:
                prompts.forget()
                raise
        return result.value["out"].to(x)

    def settle(self) -> None:
        """Do after a run what the user wants done with the model."""
        if self._used is not None:
            residence.settle(self._used, self._request.after_sampling)
            self._used = None


def _equal(a: Any, b: Any) -> bool:
    if torch.is_tensor(a) and torch.is_tensor(b):
        return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and not torch.is_tensor(a) and a == b
