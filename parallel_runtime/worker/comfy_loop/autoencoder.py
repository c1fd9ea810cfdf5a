"""A VAE of ComfyUI's in this rank: made by the function that made it in ComfyUI, or from its weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import comfy.sd
import torch
from torch import Tensor, nn

from ...autoencoders import COMPARED, kind_of
from ...errors import Refused
from ...jobs import Job, VAEJob
from ...mapped import Mapped, load_mapped
from ...specs import ModelSpec
from ...witness import witness
from ..ranks import machine
from ..vaes import VAE
from .comfyui import named

NO_LIMIT = 1e9  # GiB


def load(spec: ModelSpec, device: torch.device, on_share: Callable[[float], None], job: Job) -> VAE:
    """Machines without a part in it have nothing of it. Raises Refused."""
    assert isinstance(job, VAEJob)
    if machine():
        return VAE(spec, nn.Identity(), device=device)
    try:
        return VAE(spec, build(spec, job.weights, device), device=device)
    except OSError as error:
        raise Refused(str(error)) from None


def build(spec: ModelSpec, weights: Mapping[str, Tensor] | None, device: torch.device) -> nn.Module:
    """The autoencoder that `spec` describes. Raises Refused where ComfyUI makes another one of it here."""
    if spec.loader:
        model = load_mapped(Mapped, named(spec.loader), json.loads(spec.arguments), None).model
    else:
        model = _of_weights(spec, weights)
    dtype = getattr(torch, spec.weight_dtype)
    model = model.to(dtype)
    if kind_of(model) != spec.kind:
        raise Refused(f"ComfyUI makes a {kind_of(model)} of its weights in a worker")
    if witness(model, dtype) != spec.witness:
        raise Refused("its file has changed since it was loaded, or its weights have: load it again")
    return unlimited(model).eval().requires_grad_(False).to(device)


def unlimited(model: nn.Module) -> nn.Module:
    """It slices nothing by the bytes that a rank happens to hold; ranks hold little as it is. Without any limit SeedVR2
    would keep more than it needs between chunks of time."""
    if limits := COMPARED[kind_of(model)].limits:
        getattr(model, limits)(NO_LIMIT, NO_LIMIT)
    return model


@contextmanager
def chunked_alike(function: str, bytes_: int) -> Iterator[Callable[[int, int], None]]:
    """Within it `function`, by which a VAE cuts time to what a device can hold, answers alike on all ranks: in
    proportion to rows, so that all cut at the same places. Yields what to call before a run: (own rows, all rows)."""
    if not function:
        yield lambda own, total: None
        return
    module, _, name = function.partition(":")
    named(function)
    home, own_bytes = sys.modules[module], bytes_
    theirs = getattr(home, name)

    def of_rows(own: int, total: int) -> None:
        nonlocal own_bytes
        own_bytes = own * max(1, bytes_ // total)

    setattr(home, name, lambda device: own_bytes)
    try:
        yield of_rows
    finally:
        setattr(home, name, theirs)


def _of_weights(spec: ModelSpec, weights: Mapping[str, Tensor] | None) -> nn.Module:
    if weights is None:
        raise Refused("its weights did not come with it")
    vae = comfy.sd.VAE(sd=dict(weights), metadata=json.loads(spec.arguments), dtype=getattr(torch, spec.weight_dtype))
    if vae.first_stage_model is None:
        raise Refused("ComfyUI does not recognise it by its weights alone; take it from Load VAE or Load Checkpoint")
    return vae.first_stage_model
