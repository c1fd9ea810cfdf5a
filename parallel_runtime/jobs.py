"""The jobs that workers run: one dataclass a kind, of tensors and plain values. The model is sent beside the job."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .specs import EncoderMethod, VAEMethod

# ComfyUI's guiders that evaluate the negative prompt with a MODEL of its own, and the attribute that has it.
TWO_MODEL_GUIDERS = {"comfy_extras.nodes_custom_sampler:Guider_DualModel": "uncond_model_patcher"}
MAX_CACHED_CONDS = 8  # a worker keeps the conditions of as many prompts; the host counts them the same way


@dataclass(frozen=True, eq=False)
class Described:
    """What loading/object_codec.py has described: JSON in which tensors have names. It goes to a worker as it is."""

    tree: Any
    tensors: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplingJob:
    """One call of a ComfyUI guider's `sample`: what runs, on what, with which noise levels.

    Code is named, never sent. `guider` is the class's name; `described` has its `guider_attributes`, the `sampler`,
    `conds` by the guider's names for them as ComfyUI's condition dicts, and `models`: what is on the guider's MODEL,
    and on that of its negative prompt where it has another. Latents are full-size [B, C, (T,) H, W] float32, and so is
    `mask`, as ComfyUI's `prepare_mask` leaves it; `sigmas` is 1-D. `random_states` are the host's generator states by
    device type: samplers may draw from them, and would on a device of this `generator_kind`. `weight_patches` are those
    of the same MODELs, each None where the workers have them already. `latent_shapes` belong to latents (audio and
    video) that are packed into one. `packs` are imported first, in this order; `replaced` has by name the fingerprint
    and the packs of ComfyUI's and torch's code that they have replaced, and `states` the fingerprints of what code of
    packs reads and is not sent. `runs_changed_code` means that the network runs code that is not ComfyUI's;
    `batch_coupled`, that something on the MODEL sees every prompt and image at once, so they are not divided;
    `images_coupled`, that something sees every image of a prompt, so only prompts are divided.
    An entry of a batch is one image for one prompt: `entries_per_call` of them go through the network at once; 0 for
    all, also those of several prompts."""

    guider: str
    described: Described
    noise: Tensor
    latent: Tensor
    mask: Tensor | None
    sigmas: Tensor
    seed: int | None
    random_states: dict[str, Tensor]
    generator_kind: str
    weight_patches: list[Described | None]
    packs: list[str]
    replaced: dict[str, list[str]]
    states: dict[str, str]
    batch_coupled: bool
    runs_changed_code: bool = False
    latent_shapes: list[Any] | None = None
    entries_per_call: int = 0
    images_coupled: bool = False
    pack_files: dict[str, dict[str, str]] = field(default_factory=dict)  # fingerprints of the files of `packs`


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
    """One call of ComfyUI's `diffusion_model`, or of another `method` of it: ComfyUI's arguments, without the
    conditions.

    `call_arguments` change from call to call (x [B, C, (T,) H, W] or a list of such, timestep, a ControlNet's
    residuals), by argument name; `options` are the described transformer_options. `cond_arguments`
    are what ComfyUI makes of the conditions. Workers keep them under `cond_number`: they are None where workers have
    them. `batch_coupled`: an option sees all prompts at once."""

    call_arguments: dict[str, Any]
    options: Described | None
    cond_arguments: dict[str, Any] | None
    weight_patches: Described | None
    batch_coupled: bool
    method: str = "forward"
    cond_number: int = 0

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """The shapes of the tensors in `call_arguments`, on which the seconds of the call depend."""
        return tuple(leaf.shape for leaf in pytree.tree_leaves(self.call_arguments) if torch.is_tensor(leaf))


@dataclass(frozen=True, kw_only=True, eq=False)
class VAEJob:
    """One call of a VAE's `method` on x [B, C, (T,) H, W], whose rows are divided in multiples of `unit`.

    The ranks write the result [shape] of `dtype` into the request's SharedOutput, from element `offset` on.
    `output` is its memory file, which a worker gets beside the job.
    `random_states` are the host's generator states by device type. `chunk_bytes` is the free memory that ComfyUI would
    use on the host where a VAE splits time by it. `weights` is the state dict, None where the workers have it.
    `shares` are proportions of rows for each rank of ComfyUI's machine; empty for equal ones."""

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
    output: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class EncodingJob:
    """Calls of a text encoder's `method` on the workers `ranks`, which have its weights: each has them all and takes
    calls in turn, or each has as many of its units (`encoder_units`) as `stages` says and takes part in every call.

    Each of `calls` has the `arguments` by name, such as tokens; the `options` of each call of `set_clip_options` before
    it; and `hook_patches`, the weight patches of the hooks in force, by weight. `weight_patches` are those on the CLIP;
    None where the workers have them already."""

    method: EncoderMethod
    ranks: list[int]
    calls: list[Described]
    weight_patches: Described | None
    stages: list[int] = field(default_factory=list)


Job = SamplingJob | EvaluationJob | DemoJob | VAEJob | EncodingJob


def is_outer_method(name: str) -> bool:
    """Is this a method that ComfyUI calls on texts and the like outside of `forward`? It names all of them so."""
    return name.startswith("preprocess_")


def answering_ranks(job: Job) -> list[int]:
    """Returns the ranks whose results are, together, that of the job."""
    if not isinstance(job, EncodingJob):
        return [0]
    return job.ranks[: 1 if job.stages else len(job.calls)]
