"""Evaluations for samplers that run in ComfyUI's own process: the network is in the workers, the loop is not."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher

from ..parallel_runtime.errors import Refused
from ..parallel_runtime.host.group import WorkerGroup
from ..parallel_runtime.jobs import EvaluationJob
from ..parallel_runtime.specs import ParallelRequest, Storage
from .describe import Source, describe_model, patched_inside
from .patches import check_sizes, describe_inside
from .residence import residence
from .workers import borrowed

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


@dataclass(eq=False)
class _Run:
    """From ComfyUI's `pre_run` to its `cleanup`: what is sampled with, and whether the workers have been asked."""

    source: Source
    claimed: WorkerGroup | None = None
    storage: Storage | None = None


class RemoteEvaluation:
    """A stand-in's answer: one round trip to the worker group."""

    def __init__(self, request: ParallelRequest) -> None:
        self._request = request
        self._run: _Run | None = None

    def begin(self, model: ModelPatcher) -> None:
        """Raises Refused for a MODEL whose network no worker could have."""
        if self._request.step_cache:
            raise Refused(
                f"step_cache {self._request.step_cache:g} on CP Load Diffusion Model: evaluations for a native sampler "
                "do not say where a run begins; sample with a CP Sampler, or set step_cache to 0 here"
            )
        if model.hook_patches or model.forced_hooks:
            raise Refused(
                "hooks (scheduled LoRA) cannot change weights in the workers from step to step while the sampler runs "
                "in ComfyUI's process; remove them, or sample with KSampler"
            )
        check_sizes(model)
        self._run = _Run(describe_model(model, self._request))

    def __call__(self, method: str, arguments: dict[str, Any]) -> Any:
        """What ComfyUI's network would give, where its first argument is and in its dtype. Raises Refused."""
        assert self._run is not None, "an evaluation outside of a run"
        each, conds = _told_apart(arguments, method)
        options = arguments.get("transformer_options")
        result = self._answer(method, each, conds, options)
        like = next(iter(arguments.values()))
        return _like(result, like[0] if isinstance(like, list) else like)

    def _answer(self, method: str, each: dict[str, Any], conds: dict[str, Any], options: dict[str, Any] | None) -> Any:
        run = self._run
        assert run is not None
        source, spec = run.source, run.source.spec
        work = source.work(*_sizes(each, conds))
        together = patched_inside(options or {})
        check = comfy.model_management.throw_exception_if_processing_interrupted
        with borrowed(source, self._request, work, together=together, measure=run.storage is None) as (group, division):
            if run.storage is None or not group.holds(spec) or run.claimed is not group:
                run.storage = residence.lodge(group, spec, division, work, self._request.weights).storage
            run.claimed = group
            prompts = _prompts.setdefault(group, Prompts())
            known = prompts.find(conds)
            job = EvaluationJob(
                each=each,
                options=None if options is None else describe_inside(options),
                prompt=prompts.add(conds) if known is None else known,
                conds=conds if known is None else None,
                patches=None if group.holds(spec) else source.weights,
                together=together,
                method=method,
            )
            try:
                return group.sample(spec, division.degrees, job, storage=run.storage, watch=check).value["out"]
            except BaseException:
                prompts.forget()
                raise

    def settle(self) -> None:
        """Do after a run what the user wants done with the model."""
        if self._run is not None and self._run.claimed is not None:
            residence.settle(self._run.source.spec, self._request.after_sampling)
        self._run = None


def _told_apart(arguments: dict[str, Any], method: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What changes from call to call: the latent, the timestep, a ControlNet's residuals; and the conditions."""
    given = {key: value for key, value in arguments.items() if value is not None and key != "transformer_options"}
    changing = [*given][:2] if method == "forward" else []
    each = {key: value for key, value in given.items() if key in (*changing, "control")}
    return each, {key: value for key, value in given.items() if key not in each}


def _sizes(each: dict[str, Any], conds: dict[str, Any]) -> tuple[tuple[int, ...], int]:
    """The latent's shape, the first of several, and the tokens of text."""
    latent = next(iter(each.values()), None)
    latent = latent[0] if isinstance(latent, list) else latent
    text = next((value for value in conds.values() if torch.is_tensor(value) and value.ndim == 3), None)
    shape = (1, 1, 1, 1) if latent is None else tuple(latent.shape)
    return shape, 0 if text is None else text.shape[1]


def _like(value: Any, like: torch.Tensor) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_like(part, like) for part in value)
    return value.to(like.device) if torch.is_tensor(value) else value


def _equal(a: Any, b: Any) -> bool:
    if torch.is_tensor(a) and torch.is_tensor(b):
        return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and not torch.is_tensor(a) and a == b
