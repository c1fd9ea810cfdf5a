"""What one request asks of the workers: tensors, and the rest in words. The model that it is for is named beside it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .specs import VAEMethod

PROMPTS = 8  # whose conditions a worker keeps, and the host counts along


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingJob:
    """One call of a ComfyUI guider's `sample`: what runs, on what, with which noise levels.

    Code is named, never sent: `guider` is `module:name` inside ComfyUI, `sampler` what nodes/code.py describes. `conds`
    maps the guider's condition names to ComfyUI's condition dicts, described likewise. Latents are full-size
    [B, C, (T,) H, W] float32; `sigmas` is 1-D. `random_state` is the host's global CPU generator at that moment:
    samplers may draw from it. `attributes` are plain values in place of the network's own. ComfyUI's own code on the
    MODEL is described (nodes/code.py): in `model_options`, in `wrappers` and `callbacks` as [kind, key, functions], and
    in `patches` by weight. `patches` is None where the workers have the model's. `latent_shapes` are those of several
    latents (audio and video) that are packed into one. `together`: something on the MODEL sees every prompt and image
    at once, so that they are shared out to nobody. `step_cache` is the threshold of first-block caching, 0 for none;
    `warmup_steps` are exact where later ones go through a pipeline in patches.
    `rows` of a batch go through the network at once, 0 for all of them, those of several prompts too.
    """

    guider: str
    guider_attributes: dict[str, Any]
    conds: dict[str, Any]
    sampler: dict[str, Any]
    noise: Tensor
    latent: Tensor
    mask: Tensor | None
    sigmas: Tensor
    seed: int | None
    random_seed: int
    random_state: Tensor
    model_sampling: dict[str, Any]
    attributes: dict[str, Any]
    model_options: dict[str, Any]
    wrappers: list[list[Any]]
    callbacks: list[list[Any]]
    patches: dict[str, list[Any]] | None
    together: bool
    latent_shapes: list[Any] | None = None
    step_cache: float = 0.0
    warmup_steps: int = 1
    rows: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class DemoJob:
    """Flow-matching Euler steps on `noise` [B, C, H, W] (model space), with classifier-free guidance at cfg != 1."""

    noise: Tensor
    sigmas: Tensor
    cfg: float
    positive: dict[str, Any]
    negative: dict[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationJob:
    """One call of ComfyUI's `diffusion_model`, or of another `method` of it: as ComfyUI passes it, less the conditions.

    `each` is what changes from call to call (x [B, C, (T,) H, W] or a list of such, timestep, a ControlNet's
    residuals), by argument; `options` the described transformer_options. Conditions stay with the workers, numbered
    `prompt` by the group: `conds` is None where they have these already. `together`: something in the options sees all
    rows at once.
    """

    each: dict[str, Any]
    options: dict[str, Any] | None
    conds: dict[str, Any] | None
    patches: dict[str, list[Any]] | None
    together: bool
    method: str = "forward"
    prompt: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class VAEJob:
    """One call of a VAE's `method` on x [B, C, (T,) H, W], of which `unit` rows make one of the latent.

    The ranks write its result [shape] of `dtype` into the room that the request came with, from element `offset` on.
    `random_states` are those of the host's generators by type of device. `chunk_bytes` is what ComfyUI would go by on
    the host where a VAE cuts time by the device's memory. `weights` is its state dict where the workers need it.
    `shares` of the rows are one for each rank of ComfyUI's machine, or none: all alike.
    """

    method: VAEMethod
    x: Tensor
    unit: int
    shape: list[int]
    dtype: str
    offset: int
    random_states: dict[str, Tensor]
    chunk_bytes: int
    weights: dict[str, Tensor] | None
    shares: list[int] = field(default_factory=list)


Job = SamplingJob | EvaluationJob | DemoJob | VAEJob
