"""Loads one of ComfyUI's VAEs on this rank: with the function that loaded it in ComfyUI, or from its weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import comfy.sd
import torch
from torch import Tensor, nn

from ...architectures.autoencoders import COMPARED, kind_of, name_of
from ...engine.comm.ranks import machine
from ...engine.rows.conversion import leave_undivided
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
    return made_divisible(model).eval().requires_grad_(False).to(device)


def made_divisible(model: nn.Module) -> nn.Module:
    """Sets a limit too high for the model to slice by each rank's bytes, few as they are: without any SeedVR2 would
    keep more than it needs between chunks of time. Modules that attend along time only run as they are."""
    compared = COMPARED[kind_of(model)]
    if compared.limits:
        getattr(model, compared.limits)(NO_LIMIT_GIB, NO_LIMIT_GIB)
    for module in model.modules():
        if name_of(module) in compared.over_time:
            leave_undivided(module)
    return model


@contextmanager
def uniform_chunk_bytes(function: str, bytes_: int, local_rows: int, rows: int) -> Iterator[None]:
    """Replaces `function`, which returns the bytes by which a VAE splits time into chunks, with one that returns
    `bytes_` in proportion to a rank's `local_rows` of `rows`, so that all ranks split at the same frames."""
    if not function:
        yield
        return
    module_name, _, name = function.partition(":")
    original, module = named(function), sys.modules[module_name]
    setattr(module, name, lambda device: local_rows * max(1, bytes_ // rows))
    try:
        yield
    finally:
        setattr(module, name, original)
