"""What the workers of a group have been sent, and need not be sent again: weights, patches on them, conditions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ..errors import Refused
from ..jobs import PROMPTS, EvaluationJob, Job, SamplingJob, VAEJob
from ..specs import ModelSpec


class Sent:
    def __init__(self) -> None:
        self._patches: dict[ModelSpec, str] = {}  # of each model and VAE that the workers hold
        self._prompts: list[tuple[int, dict[str, Any]]] = []
        self._numbered = 0

    def holds(self, model: ModelSpec) -> bool:
        """Have the workers got `model`, weight patches and all?"""
        return self._patches.get(model.unpatched) == model.patches

    def drop(self, model: ModelSpec) -> None:
        self._patches.pop(model.unpatched, None)

    @contextmanager
    def all_of(self, job: Job, model: ModelSpec) -> Iterator[Job]:
        """Yields what of `job` is to be sent; where that does not fail the workers have all of it afterwards."""
        held = self.holds(model)
        try:
            lean = self._without_weights(job) if held else job
            self.drop(model)
            yield self._without_prompt(lean) if isinstance(lean, EvaluationJob) else lean
        except BaseException as error:
            self._prompts = []
            if held and isinstance(error, Refused):
                self._patches[model.unpatched] = model.patches
            raise
        self._patches[model.unpatched] = model.patches

    def _without_weights(self, job: Job) -> Job:
        match job:
            case SamplingJob() | EvaluationJob():
                return replace(job, patches=None)
            case VAEJob():
                return replace(job, weights=None)
        return job

    def _without_prompt(self, job: EvaluationJob) -> EvaluationJob:
        """Conditions are compared by value: they may change from step to step under one uuid of ComfyUI's."""
        for number, conds in self._prompts:
            if _equal(conds, job.conds):
                return replace(job, prompt=number, conds=None)
        self._numbered += 1
        self._prompts = [*self._prompts, (self._numbered, job.conds or {})][-PROMPTS:]
        return replace(job, prompt=self._numbered)


def _equal(a: Any, b: Any) -> bool:
    if torch.is_tensor(a) and torch.is_tensor(b):
        return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and not torch.is_tensor(a) and a == b
