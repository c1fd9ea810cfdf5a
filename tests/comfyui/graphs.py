"""Prompts in ComfyUI's API format: a model, two texts, a latent, KSampler or CP Sampler, the latent saved."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from .client import Graph, workers_of

Sampler = Literal["KSampler", "CPSampler"]
Link = list[Any]

TEXTS: dict[str, dict[str, float]] = {  # width of the text, and the extras that the family reads
    "flux_dev": {"dim": 128, "pooled": 64, "guidance": 3.5},
    "flux_schnell": {"dim": 128, "pooled": 64},
    "wan_t2v": {"dim": 4096},
    "qwen_image": {"dim": 96},
    "ltxv": {"dim": 4096},
}
_nonces = itertools.count(1)


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The CP Parallel Config node, as a user fills it in; 0 and "auto" leave the choice to the node."""

    ring_degree: int = 0
    ulysses_degree: int = 0
    rotate_method: str = "alltoall"
    convert_to_fp32: bool = True
    attention_backend: str = "auto"
    dtype: str = "float32"
    devices: str = ""
    cfg_degree: int = 0
    data_degree: int = 1
    step_cache: float = 0.0
    after_sampling: str = "keep"
    nnodes: int = 1
    rdzv_endpoint: str = ""
    weights: str = "auto"
    compile: str = "off"
    cuda_graphs: str = "auto"
    shares: str = "auto"
    pipeline_degree: int = 1
    patches: int = 1
    warmup_steps: int = 1

    @property
    def workers(self) -> int:
        return workers_of(vars(self))


@dataclass(frozen=True, kw_only=True)
class Job:
    """One sampling job; `latent_seed` -1 is an empty latent, `size` is height x width of the latent."""

    family: str
    seed: int = 7
    steps: int = 4
    cfg: float = 1.0
    sampler: str = "euler"
    scheduler: str = "simple"
    denoise: float = 1.0
    batch: int = 1
    size: tuple[int, int] = (16, 24)
    latent_seed: int = -1
    masked: int = 0  # masks, one for each image or for several in turn
    prompt_tokens: tuple[int, int] = (20, 20)
    text_mask_valid: int | None = None
    second_prompt: bool = False
    full_checkpoint: bool = False

    @property
    def latent_shape(self) -> tuple[int, ...]:
        if self.family == "ltxv":  # a latent pixel is a token
            return (self.batch, 128, 2, *(side // 2 for side in self.size))
        frames = (3,) if self.family == "wan_t2v" else ()
        return (self.batch, 16, *frames, *self.size)


def sampling_graph(job: Job, sampler: Sampler, parallel: Parallel | None = None) -> Graph:
    """Fresh on purpose: ComfyUI samples it again although it has the result of an equal graph in its cache."""
    graph: Graph = {
        "model": _model_loader(job),
        "positive": _text(job, job.prompt_tokens[0], seed=1001),
        "negative": _text(job, job.prompt_tokens[1], seed=2002),
        "latent": _latent(job),
        "sampler": _sampler(job, sampler),
        "save": _node("CPTestSaveLatent", samples=["sampler", 0], name=f"latent_{next(_nonces)}"),
    }
    if job.second_prompt:
        _add_second_prompt(graph, job)
    if parallel is not None:
        graph["config"] = _node("CPParallelConfig", **vars(parallel))
        graph["sampler"]["inputs"]["cp_config"] = ["config", 0]
    return graph


def with_attention_patch(graph: Graph) -> Graph:
    return _before_the_sampler(graph, "model", "CPTestAttentionPatch")


def with_control_net(graph: Graph) -> Graph:
    return _before_the_sampler(graph, "positive", "CPTestControl", into="conditioning")


def with_loras(graph: Graph, stack: Sequence[tuple[str, float]]) -> Graph:
    """The files of `stack`, each with its strength, one after the other on what the sampler samples with."""
    for index, (name, strength) in enumerate(stack):
        graph[f"lora_{index}"] = lora_node(graph["sampler"]["inputs"]["model"], name, strength)
        graph["sampler"]["inputs"]["model"] = [f"lora_{index}", 0]
    return graph


def with_hooks(graph: Graph, hooks: Link) -> Graph:
    """The positive prompt has these hooks."""
    graph["hooked"] = _node(
        "ConditioningSetProperties", cond_NEW=["positive", 0], strength=1.0, set_cond_area="default", hooks=hooks
    )
    graph["sampler"]["inputs"]["positive"] = ["hooked", 0]
    return graph


def lora_node(model: list[Any], name: str, strength: float) -> dict[str, Any]:
    return _node("LoraLoaderModelOnly", model=model, lora_name=name, strength_model=strength)


def longer(job: Job, *, steps: int) -> Job:
    """Long enough to do something to it in the middle."""
    return replace(job, steps=steps, size=(48, 48))


def _node(class_type: str, **inputs: object) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def _model_loader(job: Job) -> dict[str, Any]:
    if job.full_checkpoint:
        return _node("CheckpointLoaderSimple", ckpt_name=f"{job.family}_full.safetensors")
    return _node("UNETLoader", unet_name=f"{job.family}.safetensors", weight_dtype="default")


def _text(job: Job, tokens: int, *, seed: int) -> dict[str, Any]:
    spec: dict[str, float] = {"tokens": tokens, **TEXTS[job.family]}
    if job.text_mask_valid is not None or job.family == "ltxv":  # ComfyUI's LTX-Video cannot do without
        spec["mask_valid"] = min(job.text_mask_valid or tokens, tokens)
    return _node("CPTestConditioning", spec=json.dumps(spec), seed=seed)


def _latent(job: Job) -> dict[str, Any]:
    shape = ",".join(map(str, job.latent_shape))
    return _node("CPTestLatent", shape=shape, seed=job.latent_seed, masked=job.masked, nonce=next(_nonces))


def _sampler(job: Job, sampler: Sampler) -> dict[str, Any]:
    return _node(
        sampler,
        model=["model", 0],
        seed=job.seed,
        steps=job.steps,
        cfg=job.cfg,
        sampler_name=job.sampler,
        scheduler=job.scheduler,
        positive=["positive", 0],
        negative=["negative", 0],
        latent_image=["latent", 0],
        denoise=job.denoise,
    )


def _add_second_prompt(graph: Graph, job: Job) -> None:
    """The whole picture and one area of it, each with its own text."""
    pixels = 8 * (job.size[0] // 2), 8 * (job.size[1] // 2)
    graph["other"] = _text(job, job.prompt_tokens[0] + 3, seed=3003)
    graph["area"] = _node(
        "ConditioningSetArea", conditioning=["other", 0], height=pixels[0], width=pixels[1], x=16, y=16, strength=0.8
    )
    graph["both"] = _node("ConditioningCombine", conditioning_1=["positive", 0], conditioning_2=["area", 0])
    graph["sampler"]["inputs"]["positive"] = ["both", 0]


def _before_the_sampler(graph: Graph, socket: str, class_type: str, *, into: str = "", **inputs: object) -> Graph:
    source: Link = graph["sampler"]["inputs"][socket]
    graph["added"] = _node(class_type, **{into or socket: source}, **inputs)
    graph["sampler"]["inputs"][socket] = ["added", 0]
    return graph
