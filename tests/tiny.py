"""Tiny checkpoints with random weights under ComfyUI's parameter names, one function a family.

Files whose width ComfyUI hard-codes carry metadata `cp_tiny`, which the tests' ComfyUI honours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor


class Weights:
    """A seeded state dict under construction."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, Tensor] = {}

    def normal(self, name: str, *shape: int, std: float = 1.0, mean: float = 0.0) -> None:
        assert name not in self.tensors, name
        self.tensors[name] = torch.randn(*shape, generator=self.generator) * std + mean

    def linear(self, name: str, out: int, inner: int, bias: bool = True, gain: float = 1.0) -> None:
        self.normal(f"{name}.weight", out, inner, std=gain / math.sqrt(inner))
        if bias:
            self.normal(f"{name}.bias", out, std=0.05)

    def conv(self, name: str, out: int, inner: int, *kernel: int) -> None:
        self.normal(f"{name}.weight", out, inner, *kernel, std=1 / math.sqrt(inner * math.prod(kernel)))
        self.normal(f"{name}.bias", out, std=0.05)

    def rms(self, name: str, dim: int) -> None:
        self.normal(name, dim, std=0.1, mean=1.0)

    def layer_norm(self, name: str, dim: int) -> None:
        self.rms(f"{name}.weight", dim)
        self.normal(f"{name}.bias", dim, std=0.05)


Overrides = dict[str, Any] | None


def flux(w: Weights, *, heads: int = 2, double: int = 2, single: int = 2, guided: bool = True) -> Overrides:
    dim, text, pooled = heads * 128, 128, 64
    w.linear("img_in", dim, 64)
    for name, inner in (("time_in", 256), ("vector_in", pooled), *((("guidance_in", 256),) if guided else ())):
        w.linear(f"{name}.in_layer", dim, inner)
        w.linear(f"{name}.out_layer", dim, dim)
    w.linear("txt_in", dim, text)
    for stream in (f"double_blocks.{i}.{m}_" for i in range(double) for m in ("img", "txt")):
        w.linear(f"{stream}mod.lin", 6 * dim, dim, gain=0.5)
        _flux_attention(w, stream, dim, 128)
        w.linear(f"{stream}mlp.0", 4 * dim, dim)
        w.linear(f"{stream}mlp.2", dim, 4 * dim)
    for i in range(single):
        _flux_single(w, f"single_blocks.{i}.", dim, 128)
        w.linear(f"single_blocks.{i}.modulation.lin", 3 * dim, dim, gain=0.5)
    w.linear("final_layer.linear", 64, dim)
    w.linear("final_layer.adaLN_modulation.1", 2 * dim, dim, gain=0.5)
    return None


def _flux_attention(w: Weights, stream: str, dim: int, head: int, bias: bool = True) -> None:
    w.linear(f"{stream}attn.qkv", 3 * dim, dim, bias=bias)
    w.rms(f"{stream}attn.norm.query_norm.scale", head)
    w.rms(f"{stream}attn.norm.key_norm.scale", head)
    w.linear(f"{stream}attn.proj", dim, dim, bias=bias)


def _flux_single(w: Weights, block: str, dim: int, head: int) -> None:
    w.linear(f"{block}linear1", 7 * dim, dim)
    w.linear(f"{block}linear2", dim, 5 * dim)
    w.rms(f"{block}norm.query_norm.scale", head)
    w.rms(f"{block}norm.key_norm.scale", head)


def qwen_image(w: Weights, *, heads: int = 4, head: int = 32, layers: int = 2, text: int = 96) -> Overrides:
    dim = heads * head
    w.linear("time_text_embed.timestep_embedder.linear_1", dim, 256)
    w.linear("time_text_embed.timestep_embedder.linear_2", dim, dim)
    w.rms("txt_norm.weight", text)
    w.linear("img_in", dim, 64)
    w.linear("txt_in", dim, text)
    for block in (f"transformer_blocks.{i}." for i in range(layers)):
        w.linear(f"{block}img_mod.1", 6 * dim, dim, gain=0.5)
        w.linear(f"{block}txt_mod.1", 6 * dim, dim, gain=0.5)
        for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out"):
            w.linear(f"{block}attn.{name}", dim, dim)
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            w.rms(f"{block}attn.{name}.weight", head)
        for stream in ("img_mlp", "txt_mlp"):
            w.linear(f"{block}{stream}.net.0.proj", 4 * dim, dim)
            w.linear(f"{block}{stream}.net.2", dim, 4 * dim)
    w.linear("norm_out.linear", 2 * dim, dim, gain=0.5)
    w.linear("proj_out", 64, dim)
    axes = [head // 4, head * 3 // 8, head * 3 // 8]
    width = {"num_attention_heads": heads, "attention_head_dim": head, "joint_attention_dim": text}
    return {"final": {**width, "axes_dims_rope": axes}}


def wan(w: Weights, *, heads: int = 2, layers: int = 2, channels: int = 16, image: bool = False) -> Overrides:
    dim, hidden = heads * 128, 256
    w.conv("patch_embedding", dim, channels, 1, 2, 2)
    w.linear("text_embedding.0", dim, 4096)
    w.linear("text_embedding.2", dim, dim)
    w.linear("time_embedding.0", dim, 256)
    w.linear("time_embedding.2", dim, dim)
    w.linear("time_projection.1", 6 * dim, dim, gain=0.5)
    for block in (f"blocks.{i}." for i in range(layers)):
        for attention in ("self_attn", "cross_attn"):
            for name in "qkvo":
                w.linear(f"{block}{attention}.{name}", dim, dim)
            w.rms(f"{block}{attention}.norm_q.weight", dim)
            w.rms(f"{block}{attention}.norm_k.weight", dim)
        if image:
            w.linear(f"{block}cross_attn.k_img", dim, dim)
            w.linear(f"{block}cross_attn.v_img", dim, dim)
            w.rms(f"{block}cross_attn.norm_k_img.weight", dim)
        w.layer_norm(f"{block}norm3", dim)
        w.linear(f"{block}ffn.0", hidden, dim)
        w.linear(f"{block}ffn.2", dim, hidden)
        w.normal(f"{block}modulation", 1, 6, dim, std=1 / math.sqrt(dim))
    w.linear("head.head", 64, dim)
    w.normal("head.modulation", 1, 2, dim, std=1 / math.sqrt(dim))
    if image:
        w.layer_norm("img_emb.proj.0", 1280)
        w.linear("img_emb.proj.1", 1280, 1280)
        w.linear("img_emb.proj.3", dim, 1280)
        w.layer_norm("img_emb.proj.4", dim)
    return None


class Tiny(NamedTuple):
    """How to make one, and an input for it: a latent's shape and what its conditioning holds."""

    build: Callable[..., Overrides]
    options: dict[str, Any]
    latent: tuple[int, ...]
    text: tuple[int, int]
    pooled: int = 0
    guidance: float | None = None
    clip_vision: bool = False
    mask: int = 0  # text tokens in use, 0 for no mask
    frame_rate: int = 0


IMAGE, VIDEO = (1, 16, 16, 24), (1, 16, 3, 8, 12)
TINY: dict[str, Tiny] = {
    "flux_dev": Tiny(flux, {}, IMAGE, (32, 128), pooled=64, guidance=3.5),
    "flux_schnell": Tiny(flux, {"guided": False}, IMAGE, (32, 128), pooled=64),
    "qwen_image": Tiny(qwen_image, {}, (1, 16, 1, 16, 24), (20, 96)),
    "wan_t2v": Tiny(wan, {}, VIDEO, (512, 4096)),
    "wan_i2v": Tiny(wan, {"channels": 36, "image": True}, VIDEO, (512, 4096), clip_vision=True),
}


def tensors(name: str, seed: int | None = None, **options: Any) -> tuple[dict[str, Tensor], Overrides]:
    """The parameters of a tiny `name` in float32, and what ComfyUI's detection must be told of it (or None)."""
    tiny = TINY[name]
    weights = Weights(list(TINY).index(name) + 1 if seed is None else seed)
    overrides = tiny.build(weights, **{**tiny.options, **options})
    return weights.tensors, overrides


def write(
    folder: Path | str,
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    prefix: str = "",
    beside: dict[str, Tensor] | None = None,
    **options: Any,
) -> Path:
    """Write `<folder>/cp_tiny_<name>.safetensors`; `beside` are further tensors, as in a full checkpoint."""
    state, overrides = tensors(name, **options)
    metadata = {"format": "pt", **({"cp_tiny": json.dumps(overrides)} if overrides else {})}
    path = Path(folder) / f"cp_tiny_{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    named = {prefix + key: value.to(dtype).contiguous() for key, value in state.items()}
    save_file({**named, **(beside or {})}, path, metadata=metadata)
    return path


def hints(name: str, **options: Any) -> dict[str, Any]:
    """What ComfyUI's unet_config would say of a tiny `name` beyond its shapes."""
    _, overrides = tensors(name, **options)
    return dict((overrides or {}).get("final", {}))
