"""A diffusers FLUX state dict to the key names of a single-file checkpoint, as ComfyUI and BFL write them.

Knows names only: no model is built here.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

RENAMES = [
    (r"^x_embedder\.", "img_in."),
    (r"^context_embedder\.", "txt_in."),
    (r"^time_text_embed\.timestep_embedder\.", "time_in."),
    (r"^time_text_embed\.text_embedder\.", "vector_in."),
    (r"^proj_out\.", "final_layer.linear."),
    (r"^norm_out\.linear\.", "final_layer.adaLN_modulation.1."),
    (r"^transformer_blocks\.", "double_blocks."),
    (r"^(single)_transformer_blocks\.", r"\1_blocks."),
    (r"\.linear_1\.", ".in_layer."),
    (r"\.linear_2\.", ".out_layer."),
    (r"\.norm1\.linear\.", ".img_mod.lin."),
    (r"\.norm1_context\.linear\.", ".txt_mod.lin."),
    (r"\.norm\.linear\.", ".modulation.lin."),
    (r"^(double\S+)\.attn\.norm_q\.weight", r"\1.img_attn.norm.query_norm.scale"),
    (r"^(double\S+)\.attn\.norm_k\.weight", r"\1.img_attn.norm.key_norm.scale"),
    (r"\.attn\.norm_added_q\.weight", ".txt_attn.norm.query_norm.scale"),
    (r"\.attn\.norm_added_k\.weight", ".txt_attn.norm.key_norm.scale"),
    (r"^(single\S+)\.attn\.norm_q\.weight", r"\1.norm.query_norm.scale"),
    (r"^(single\S+)\.attn\.norm_k\.weight", r"\1.norm.key_norm.scale"),
    (r"\.attn\.to_out\.0\.", ".img_attn.proj."),
    (r"\.attn\.to_add_out\.", ".txt_attn.proj."),
    (r"\.ff\.net\.0\.proj\.", ".img_mlp.0."),
    (r"\.ff\.net\.2\.", ".img_mlp.2."),
    (r"\.ff_context\.net\.0\.proj\.", ".txt_mlp.0."),
    (r"\.ff_context\.net\.2\.", ".txt_mlp.2."),
    (r"^(single\S+)\.proj_out\.", r"\1.linear2."),
]
FUSED = [
    (r"^transformer_blocks\.(\d+)\.attn\.to_q\.", ("to_q", "to_k", "to_v"), r"double_blocks.\1.img_attn.qkv."),
    (
        r"^transformer_blocks\.(\d+)\.attn\.add_q_proj\.",
        ("add_q_proj", "add_k_proj", "add_v_proj"),
        r"double_blocks.\1.txt_attn.qkv.",
    ),
    (
        r"^single_transformer_blocks\.(\d+)\.attn\.to_q\.",
        ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
        r"single_blocks.\1.linear1.",
    ),
]
PART_OF_FUSED = re.compile(r"\.(to_k|to_v|add_k_proj|add_v_proj|proj_mlp)\.")


def to_single_file(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same weights under the single-file names: queries, keys and values fused, final shift before scale."""
    exported = {}
    for key, tensor in state.items():
        if PART_OF_FUSED.search(key):
            continue
        name, value = _fused(state, key) or (_renamed(key), tensor)
        if key.startswith("norm_out.linear"):
            scale, shift = tensor.chunk(2)
            value = torch.cat([shift, scale])
        exported[name] = value.contiguous()
    return exported


def _fused(state: dict[str, Tensor], key: str) -> tuple[str, Tensor] | None:
    for pattern, parts, name in FUSED:
        if re.search(pattern, key):
            tensors = [state[key.replace(parts[0], part)] for part in parts]
            return re.sub(pattern, name, key), torch.cat(tensors)
    return None


def _renamed(key: str) -> str:
    for pattern, name in RENAMES:
        key = re.sub(pattern, name, key)
    return key
