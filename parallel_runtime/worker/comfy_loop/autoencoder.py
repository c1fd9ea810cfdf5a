"""Loads one of ComfyUI's VAEs on this rank: with the function that loaded it in ComfyUI, or from its weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import comfy.sd
import torch
from torch import Tensor, nn

from ...architectures.autoencoders import COMPARED, kind_of
from ...engine.comm.ranks import machine
from ...errors import Refused
from ...jobs import Job, VAEJob
from ...loading.fingerprint import model_fingerprint
from ...loading.mapped import Mapped, load_mapped
from ...specs import ModelSpec
from ..vaes import VAE
from .comfyui import named

NO_LIMIT_GIB = 1e9


def load(spec: ModelSpec, device: torch.device, on_progress: Callable[[float], None], job: Job) -> VAE:
    """Loads the VAE, or an empty one on machines that take no part in its jobs. Raises Refused."""
    assert isinstance(job, VAEJob)
    if machine():
        return VAE(spec, nn.Identity(), device=device)
    try:
        return VAE(spec, build(spec, job.weights, device), device=device)
    except OSError as error:
        raise Refused("vae.file", error=str(error)) from None


def build(spec: ModelSpec, weights: Mapping[str, Tensor] | None, device: torch.device) -> nn.Module:
    """Returns the autoencoder that `spec` describes. Raises Refused where this rank's ComfyUI builds another one."""
    dtype = getattr(torch, spec.weight_dtype)
    if spec.loader:
        model = load_mapped(Mapped, named(spec.loader), json.loads(spec.arguments), None).model
    else:
        if weights is None:
            raise Refused("vae.weights")
        model = comfy.sd.VAE(sd=dict(weights), metadata=json.loads(spec.arguments), dtype=dtype).first_stage_model
        if model is None:
            raise Refused("vae.unrecognised")
    model = model.to(dtype)
    if kind_of(model) != spec.kind:
        raise Refused("vae.kind", kind=kind_of(model))
    if model_fingerprint(model, dtype) != spec.weights_fingerprint:
        raise Refused("vae.changed")
    return without_memory_limit(model).eval().requires_grad_(False).to(device)


def without_memory_limit(model: nn.Module) -> nn.Module:
    """Sets a limit too high for the model to slice by each rank's bytes, few as they are. Without any limit SeedVR2
    would keep more than it needs between chunks of time."""
    if limits := COMPARED[kind_of(model)].limits:
        getattr(model, limits)(NO_LIMIT_GIB, NO_LIMIT_GIB)
    return model


@contextmanager
def uniform_chunk_bytes(function: str, bytes_: int) -> Iterator[Callable[[int, int], None]]:
    """Replaces `function`, which returns the bytes by which a VAE splits time into chunks, with one that returns
    `bytes_` in proportion to a rank's rows, so that all ranks split at the same frames. Yields a function to call
    before each run: (local rows, all rows)."""
    if not function:
        yield lambda local_rows, total: None
        return
    module_name, _, name = function.partition(":")
    named(function)
    module, local_bytes = sys.modules[module_name], bytes_
    original = getattr(module, name)

    def set_rows(local_rows: int, total: int) -> None:
        nonlocal local_bytes
        local_bytes = local_rows * max(1, bytes_ // total)

    setattr(module, name, lambda device: local_bytes)
    try:
        yield set_rows
    finally:
        setattr(module, name, original)
