"""Tiny checkpoints that need no ComfyUI to be written: plain tensors under the names that published files have.

ComfyUI's own detection reads them. Files whose width it hard-codes carry metadata `cp_tiny`, which the tests' ComfyUI
honours.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

Overrides = dict[str, Any] | None  # what ComfyUI's detection must be told of a width that it hard-codes


class Weights:
    """A seeded state dict under construction; parameters are drawn in the order in which they are named."""

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


def flux2(w: Weights, *, heads: int = 2, double: int = 2, single: int = 2, guided: bool = True) -> Overrides:
    dim = heads * 128

    def linear(name: str, out: int, inner: int, gain: float = 1.0) -> None:
        w.linear(name, out, inner, bias=False, gain=gain)

    linear("img_in", dim, 128)
    linear("txt_in", dim, 96)
    for name in ("time_in", "guidance_in") if guided else ("time_in",):
        linear(f"{name}.in_layer", dim, 256)
        linear(f"{name}.out_layer", dim, dim)
    linear("double_stream_modulation_img.lin", 6 * dim, dim, gain=0.5)
    linear("double_stream_modulation_txt.lin", 6 * dim, dim, gain=0.5)
    linear("single_stream_modulation.lin", 3 * dim, dim, gain=0.5)
    for stream in (f"double_blocks.{i}.{m}_" for i in range(double) for m in ("img", "txt")):
        _flux_attention(w, stream, dim, 128, bias=False)
        linear(f"{stream}mlp.0", 6 * dim, dim)
        linear(f"{stream}mlp.2", dim, 3 * dim)
    for block in (f"single_blocks.{i}." for i in range(single)):
        linear(f"{block}linear1", 9 * dim, dim)
        linear(f"{block}linear2", dim, 4 * dim)
        w.rms(f"{block}norm.query_norm.scale", 128)
        w.rms(f"{block}norm.key_norm.scale", 128)
    linear("final_layer.linear", 128, dim)
    linear("final_layer.adaLN_modulation.1", 2 * dim, dim, gain=0.5)
    return None


def chroma(w: Weights, *, heads: int = 2, head: int = 32, double: int = 19, single: int = 38) -> Overrides:
    """The depth is the real one: ComfyUI counts on 344 modulations."""
    dim, guider, inner = heads * head, "distilled_guidance_layer", 64
    w.linear("img_in", dim, 64)
    w.linear("txt_in", dim, 96)
    w.linear(f"{guider}.in_proj", inner, 64)
    for i in range(5):
        w.linear(f"{guider}.layers.{i}.in_layer", inner, inner)
        w.linear(f"{guider}.layers.{i}.out_layer", inner, inner, gain=0.5)
        w.rms(f"{guider}.norms.{i}.scale", inner)
    w.linear(f"{guider}.out_proj", dim, inner, gain=0.2)
    for stream in (f"double_blocks.{i}.{m}_" for i in range(double) for m in ("img", "txt")):
        _flux_attention(w, stream, dim, head)
        w.linear(f"{stream}mlp.0", 4 * dim, dim)
        w.linear(f"{stream}mlp.2", dim, 4 * dim)
    for i in range(single):
        _flux_single(w, f"single_blocks.{i}.", dim, head)
    w.linear("final_layer.linear", 64, dim)
    width = {"hidden_size": dim, "num_heads": heads, "out_dim": dim, "hidden_dim": inner}
    return {"final": {**width, "axes_dim": [head // 4, head * 3 // 8, head * 3 // 8]}}


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


def _next_dit(w: Weights, dim: int, head: int, qkv: int, hidden: int, layers: int, *, narrow: bool) -> None:
    """What Lumina 2 and Z-Image (`narrow` modulation) have in common."""
    text, time = 96, min(dim, 1024)
    modulated = {"noise_refiner": 2, "layers": layers}
    w.linear("x_embedder", dim, 64)
    w.linear("t_embedder.mlp.0", time, 256)
    w.linear("t_embedder.mlp.2", 256 if narrow else time, time)
    w.rms("cap_embedder.0.weight", text)
    w.linear("cap_embedder.1", dim, text)
    for block in (f"{stack}.{i}." for stack, n in {**modulated, "context_refiner": 2}.items() for i in range(n)):
        w.linear(f"{block}attention.qkv", qkv, dim, bias=False)
        w.linear(f"{block}attention.out", dim, dim, bias=False)
        w.rms(f"{block}attention.q_norm.weight", head)
        w.rms(f"{block}attention.k_norm.weight", head)
        w.linear(f"{block}feed_forward.w1", hidden, dim, bias=False)
        w.linear(f"{block}feed_forward.w2", dim, hidden, bias=False)
        w.linear(f"{block}feed_forward.w3", hidden, dim, bias=False)
        for name in ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2"):
            w.rms(f"{block}{name}.weight", dim)
    for block in (f"{stack}.{i}." for stack, n in modulated.items() for i in range(n)):
        w.linear(f"{block}adaLN_modulation.{0 if narrow else 1}", 4 * dim, min(dim, 256) if narrow else time, gain=0.5)
    w.linear("final_layer.linear", 64, dim)
    w.linear("final_layer.adaLN_modulation.1", dim, 256 if narrow else time, gain=0.5)


def lumina2(w: Weights, *, heads: int = 6, kv_heads: int = 2, head: int = 48, layers: int = 2) -> Overrides:
    dim = heads * head
    _next_dit(w, dim, head, (heads + 2 * kv_heads) * head, 256 * math.ceil(4 * dim / 256), layers, narrow=False)
    axes = {"axes_dims": [head // 3] * 3, "axes_lens": [300, 512, 512], "rope_theta": 10000.0}
    return {"final": {"n_heads": heads, "n_kv_heads": kv_heads, "ffn_dim_multiplier": 4.0, **axes}}


def z_image(w: Weights, *, heads: int = 4, head: int = 72, layers: int = 2) -> Overrides:
    """Width 288, so that ComfyUI, which rounds the feed-forward width to 256, and diffusers agree on it."""
    dim = heads * head
    _next_dit(w, dim, head, 3 * dim, dim * 8 // 3, layers, narrow=True)
    w.normal("x_pad_token", 1, dim)
    w.normal("cap_pad_token", 1, dim)
    axes = {"axes_dims": [head // 3] * 3, "axes_lens": [1536, 512, 512], "rope_theta": 256.0}
    kind = {"z_image_modulation": True, "time_scale": 1000.0, "pad_tokens_multiple": 32}
    size = {"dim": dim, "n_heads": heads, "n_kv_heads": heads, "ffn_dim_multiplier": 8 / 3}
    return {"match": {"dim": 3840}, "final": {**size, **axes, **kind}}


def sd3(w: Weights, *, depth: int = 4, dual: int = 0, side: int = 32) -> Overrides:
    """ComfyUI ties width and heads to the depth; the first `dual` blocks have a second attention."""
    dim, text, pooled = 64 * depth, 96, 64
    w.conv("x_embedder.proj", dim, 16, 2, 2)
    for name, inner in (("t_embedder", 256), ("y_embedder", pooled)):
        w.linear(f"{name}.mlp.0", dim, inner)
        w.linear(f"{name}.mlp.2", dim, dim)
    w.linear("context_embedder", dim, text)
    w.normal("pos_embed", 1, side * side, dim, std=0.5)
    for i in range(depth):
        _sd3_half(w, f"joint_blocks.{i}.context_block.", dim, last=i == depth - 1)
        _sd3_half(w, f"joint_blocks.{i}.x_block.", dim, dual=i < dual)
    w.linear("final_layer.linear", 64, dim)
    w.linear("final_layer.adaLN_modulation.1", 2 * dim, dim, gain=0.5)
    return None


def _sd3_half(w: Weights, block: str, dim: int, *, last: bool = False, dual: bool = False) -> None:
    for attention in ("attn", "attn2") if dual else ("attn",):
        w.linear(f"{block}{attention}.qkv", 3 * dim, dim)
        w.rms(f"{block}{attention}.ln_q.weight", 64)
        w.rms(f"{block}{attention}.ln_k.weight", 64)
        if not last:
            w.linear(f"{block}{attention}.proj", dim, dim)
    w.linear(f"{block}adaLN_modulation.1", (2 if last else 9 if dual else 6) * dim, dim, gain=0.5)
    if not last:
        w.linear(f"{block}mlp.fc1", 4 * dim, dim)
        w.linear(f"{block}mlp.fc2", dim, 4 * dim)


def wan(
    w: Weights,
    *,
    heads: int = 2,
    layers: int = 2,
    channels: int = 16,
    out: int = 16,
    image: bool = False,
    pair: bool = False,
) -> Overrides:
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
    w.linear("head.head", 4 * out, dim)
    w.normal("head.modulation", 1, 2, dim, std=1 / math.sqrt(dim))
    if image:
        w.layer_norm("img_emb.proj.0", 1280)
        w.linear("img_emb.proj.1", 1280, 1280)
        w.linear("img_emb.proj.3", dim, 1280)
        w.layer_norm("img_emb.proj.4", dim)
    if pair:
        w.normal("img_emb.emb_pos", 1, 2 * 257, 1280)
    return None


def ltxv(w: Weights, *, head: int = 8, layers: int = 2) -> Overrides:
    dim = 32 * head
    w.linear("patchify_proj", dim, 128)
    w.linear("adaln_single.emb.timestep_embedder.linear_1", dim, 256)
    w.linear("adaln_single.emb.timestep_embedder.linear_2", dim, dim)
    w.linear("adaln_single.linear", 6 * dim, dim, gain=0.5)
    w.linear("caption_projection.linear_1", dim, 4096)
    w.linear("caption_projection.linear_2", dim, dim)
    for block in (f"transformer_blocks.{i}." for i in range(layers)):
        for attention in ("attn1", "attn2"):
            w.rms(f"{block}{attention}.q_norm.weight", dim)
            w.rms(f"{block}{attention}.k_norm.weight", dim)
            for name in ("to_q", "to_k", "to_v", "to_out.0"):
                w.linear(f"{block}{attention}.{name}", dim, dim)
        w.linear(f"{block}ff.net.0.proj", 4 * dim, dim)
        w.linear(f"{block}ff.net.2", dim, 4 * dim)
        w.normal(f"{block}scale_shift_table", 6, dim, std=1 / math.sqrt(dim))
    w.normal("scale_shift_table", 2, dim, std=1 / math.sqrt(dim))
    w.linear("proj_out", 128, dim)
    return None


def hunyuan_video(w: Weights, *, heads: int = 2, double: int = 2, single: int = 2) -> Overrides:
    """Under Tencent's names, which ComfyUI renames as it loads."""
    dim, text = heads * 128, 96
    w.conv("img_in.proj", dim, 16, 1, 2, 2)
    for name in ("time_in", "guidance_in", "txt_in.t_embedder"):
        w.linear(f"{name}.mlp.0", dim, 256)
        w.linear(f"{name}.mlp.2", dim, dim)
    w.linear("vector_in.in_layer", dim, 768)
    w.linear("vector_in.out_layer", dim, dim)
    w.linear("txt_in.input_embedder", dim, text)
    w.linear("txt_in.c_embedder.linear_1", dim, text)
    w.linear("txt_in.c_embedder.linear_2", dim, dim)
    for block in (f"txt_in.individual_token_refiner.blocks.{i}." for i in range(2)):
        w.layer_norm(f"{block}norm1", dim)
        w.layer_norm(f"{block}norm2", dim)
        w.linear(f"{block}self_attn_qkv", 3 * dim, dim)
        w.linear(f"{block}self_attn_proj", dim, dim)
        w.linear(f"{block}mlp.fc1", 4 * dim, dim)
        w.linear(f"{block}mlp.fc2", dim, 4 * dim)
        w.linear(f"{block}adaLN_modulation.1", 2 * dim, dim, gain=0.5)
    for stream in (f"double_blocks.{i}.{m}_" for i in range(double) for m in ("img", "txt")):
        w.linear(f"{stream}mod.linear", 6 * dim, dim, gain=0.5)
        w.linear(f"{stream}attn_qkv", 3 * dim, dim)
        w.rms(f"{stream}attn_q_norm.weight", 128)
        w.rms(f"{stream}attn_k_norm.weight", 128)
        w.linear(f"{stream}attn_proj", dim, dim)
        w.linear(f"{stream}mlp.fc1", 4 * dim, dim)
        w.linear(f"{stream}mlp.fc2", dim, 4 * dim)
    for block in (f"single_blocks.{i}." for i in range(single)):
        w.linear(f"{block}linear1", 7 * dim, dim)
        w.linear(f"{block}linear2", dim, 5 * dim)
        w.rms(f"{block}q_norm.weight", 128)
        w.rms(f"{block}k_norm.weight", 128)
        w.linear(f"{block}modulation.linear", 3 * dim, dim, gain=0.5)
    w.linear("final_layer.linear", 64, dim)
    w.linear("final_layer.adaLN_modulation.1", 2 * dim, dim, gain=0.5)
    return None


TINY: dict[str, tuple[Callable[..., Overrides], dict[str, Any]]] = {  # how to make one
    "flux_dev": (flux, {}),
    "flux_schnell": (flux, {"guided": False}),
    "flux2": (flux2, {}),
    "chroma": (chroma, {}),
    "qwen_image": (qwen_image, {}),
    "z_image": (z_image, {}),
    "lumina2": (lumina2, {}),
    "sd35_large": (sd3, {}),
    "sd35_medium": (sd3, {"dual": 2}),
    "wan_t2v": (wan, {}),
    "wan_i2v": (wan, {"channels": 36, "image": True}),
    "wan_5b": (wan, {"channels": 48, "out": 48}),
    "ltxv": (ltxv, {}),
    "hunyuan_video": (hunyuan_video, {}),
    "wan_flf2v": (wan, {"channels": 36, "image": True, "pair": True}),
}


def tensors(name: str, seed: int | None = None, **options: Any) -> tuple[dict[str, Tensor], Overrides]:
    """The parameters of a tiny `name` in float32, and what ComfyUI's detection must be told of it (or None)."""
    build, usual = TINY[name]
    weights = Weights(list(TINY).index(name) + 1 if seed is None else seed)
    overrides = build(weights, **{**usual, **options})
    return weights.tensors, overrides


def write(folder: Path | str, name: str, *, prefix: str = "", **options: Any) -> Path:
    """Write `<folder>/cp_tiny_<name>.safetensors`."""
    state, overrides = tensors(name, **options)
    metadata = {"format": "pt", **({"cp_tiny": json.dumps(overrides)} if overrides else {})}
    path = Path(folder) / f"cp_tiny_{name}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({prefix + key: value.contiguous() for key, value in state.items()}, path, metadata=metadata)
    return path
