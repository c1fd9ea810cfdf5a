"""Tiny video transformers under ComfyUI's parameter names, one function a family."""

from __future__ import annotations

import math

from .tiny_weights import Overrides, Weights


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
