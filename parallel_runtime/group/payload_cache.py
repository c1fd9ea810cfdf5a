"""Tracks what the workers of a group have and need not be sent again: weight patches, a VAE's weights, and the
conditions of an evaluation. A network's own weights are never sent, and a SamplingJob always has its conditions.

What workers give back may be written into a `SharedOutput`, which ComfyUI then uses without a copy."""

import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import Refused
from ..jobs import MAX_CACHED_CONDS, EncodingJob, EvaluationJob, Job, SamplingJob, VAEJob
from ..request import AfterSampling
from ..specs import ModelSpec
from ..wire.bundles import LIMIT, empty_bundle, too_large


def check_size(value: Any) -> None:
    """Raises Refused for weights or conditions with more bytes than one bundle may have, before workers start."""
    sizes = {id(leaf): leaf.nbytes for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)}
    if (total := sum(sizes.values())) > LIMIT:
        raise too_large(total)


class PayloadCache:
    """What the workers of one group have of each model, for as long as the group lives."""

    def __init__(self) -> None:
        # By model without patches: the fingerprint of the weight patches that workers have. A VAE has an entry if they
        # have its weights.
        self._patches_fingerprints: dict[ModelSpec, str] = {}
        self._cond_arguments: dict[ModelSpec, list[tuple[int, dict[str, Any]]]] = {}
        self._last_number = 0

    def has_model(self, model: ModelSpec) -> bool:
        """Do the workers have `model`, with its weight patches?"""
        return self._patches_fingerprints.get(model.unpatched) == model.patches_fingerprint

    def free(self, model: ModelSpec, after: AfterSampling) -> None:
        """The workers have freed this model's conditions, and the model too if they `unload` it."""
        self._cond_arguments.pop(model.unpatched, None)
        if after == "unload":
            self._patches_fingerprints.pop(model.unpatched, None)

    @contextmanager
    def unsent_parts(self, job: Job, model: ModelSpec) -> Iterator[Job]:
        """Yields the job without what the workers have. If the block does not raise, the workers have all of it; until
        then they count as having no weight patches of this model.

        A LoRA's new strength is another `patches_fingerprint`, so it sends all weight patches of the MODEL and of its
        partner again. A SamplingJob's other fields are sent in each run, an EvaluationJob's conditions once."""
        has_patches = self.has_model(model)
        try:
            payload = self._without_sent(job) if has_patches else job
            self._patches_fingerprints.pop(model.unpatched, None)
            yield self._without_cond_arguments(payload, model) if isinstance(payload, EvaluationJob) else payload
        except BaseException as error:
            self._cond_arguments = {}
            if has_patches and isinstance(error, Refused):
                self._patches_fingerprints[model.unpatched] = model.patches_fingerprint
            raise
        self._patches_fingerprints[model.unpatched] = model.patches_fingerprint

    def _without_sent(self, job: Job) -> Job:
        match job:
            case SamplingJob():
                return replace(job, weight_patches=[None for _ in job.weight_patches])
            case EvaluationJob() | EncodingJob():
                return replace(job, weight_patches=None)
            case VAEJob():
                return replace(job, weights=None)
        return job

    def _without_cond_arguments(self, job: EvaluationJob, model: ModelSpec) -> EvaluationJob:
        """Compares conditions by value with what was sent: ComfyUI changes them in place, under one uuid."""
        sent = self._cond_arguments.get(model.unpatched, [])
        for number, conds in sent:
            if equal(conds, job.cond_arguments):
                return replace(job, cond_number=number, cond_arguments=None)
        self._last_number += 1
        conds = pytree.tree_map_only(torch.Tensor, torch.clone, job.cond_arguments or {})
        self._cond_arguments[model.unpatched] = [*sent, (self._last_number, conds)][-MAX_CACHED_CONDS:]
        return replace(job, cond_number=self._last_number)


def equal(a: Any, b: Any) -> bool:
    if torch.is_tensor(a) and torch.is_tensor(b):
        return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and not torch.is_tensor(a) and bool(a == b)


class SharedOutput:
    """A `tensor`, which outlives this, over the memory file `fd`, which does not. Raises OSError (ENOSPC)."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        size = prod(shape) * dtype.itemsize
        self.fd = empty_bundle(size)
        weakref.finalize(self, os.close, self.fd)
        self.tensor = torch.frombuffer(mmap.mmap(self.fd, size), dtype=dtype).view(tuple(shape))

    def offset_of(self, part: Tensor) -> int | None:
        """Returns the offset of `part` in `tensor`, in elements; None if it is no contiguous part of it."""
        shared = self.tensor.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
        is_part = shared and part.is_contiguous() and part.dtype == self.tensor.dtype
        return int(part.storage_offset()) if is_part else None
