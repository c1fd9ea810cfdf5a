"""Lumina-Image 2.0: one stream of text and image tokens, grouped-query attention.

Knows no diffusers. Its attention processor (Lumina2AttnProcessor2_0) is not context-parallel aware, the engine has one
that is; its class has no plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .base import Family, Shapes, count, rows
from .layout import pad_to_patch, tokens_in
from .precision import TORCH_EPS
from .table import Row, Table, drop, move, split

LONGEST = (8192, 1024, 1024)  # positions in diffusers' rope tables: text, rows, columns
EMBED = "time_caption_embed"
VARIANTS = ("clip_text_pooled_proj.",)  # NewBie


def _block(stack: str, heads: int, kv_heads: int) -> tuple[Row, ...]:
    block = f"{stack}.#"
    first = f"{block}.norm1" if stack == "context_refiner" else f"{block}.norm1.norm"  # the others are modulated
    return (
        split(
            f"{block}.attention.qkv.@",
            *(f"{block}.attn.to_{n}.@" for n in "qkv"),
            parts=(heads, kv_heads, kv_heads),
        ),
        move(f"{block}.attention.out.@", f"{block}.attn.to_out.0.@"),
        move(f"{block}.attention.q_norm.weight", f"{block}.attn.norm_q.weight"),
        move(f"{block}.attention.k_norm.weight", f"{block}.attn.norm_k.weight"),
        move(f"{block}.attention_norm1.weight", f"{first}.weight"),
        move(f"{block}.attention_norm2.weight", f"{block}.norm2.weight"),
        move(f"{block}.ffn_norm1.weight", f"{block}.ffn_norm1.weight"),
        move(f"{block}.ffn_norm2.weight", f"{block}.ffn_norm2.weight"),
        move(f"{block}.adaLN_modulation.1.@", f"{block}.norm1.linear.@"),
        *(move(f"{block}.feed_forward.w{n}.@", f"{block}.feed_forward.linear_{n}.@") for n in (1, 2, 3)),
    )


class Lumina2(Family):
    name = "lumina2"
    transformer = "Lumina2Transformer2DModel"
    conditions = frozenset({"c_crossattn", "attention_mask", "num_tokens"})  # ComfyUI lets all text tokens count
    eps: ClassVar = {"*.attn.norm_?": TORCH_EPS}

    @staticmethod
    def matches(shapes: Shapes) -> bool:
        needed = {"cap_embedder.1.weight", "noise_refiner.0.attention.k_norm.weight"}
        ours = needed <= shapes.keys() and "layers.0.adaLN_modulation.1.weight" in shapes
        return ours and not any(name.startswith(VARIANTS) for name in shapes)

    def __init__(self, shapes: Shapes, hints: Mapping[str, Any]) -> None:
        dim, patches = shapes["x_embedder.weight"]
        head_dim = shapes["layers.0.attention.q_norm.weight"][0]
        hidden = shapes["layers.0.feed_forward.w1.weight"][0]
        self.layers = count(shapes, "layers")
        self.heads = dim // head_dim
        refiners = count(shapes, "noise_refiner")
        kv_heads = (shapes["layers.0.attention.qkv.weight"][0] // head_dim - self.heads) // 2
        self.table = _table(self.heads, kv_heads)
        self._config: dict[str, Any] = {
            "patch_size": self.patch,
            "in_channels": patches // self.patch**2,
            "hidden_size": dim,
            "num_layers": self.layers,
            "num_refiner_layers": refiners,
            "num_attention_heads": self.heads,
            "num_kv_heads": kv_heads,
            "multiple_of": 1,
            "ffn_dim_multiplier": (hidden + 0.5) / (4 * dim),  # rounded down to `hidden` by diffusers
            "axes_dim_rope": tuple(hints.get("axes_dims") or [head_dim // 3] * 3),
            "axes_lens": LONGEST,
            "cap_feat_dim": shapes["cap_embedder.1.weight"][1],
        }

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def tokens(self, latent_shape: tuple[int, ...], text_tokens: int) -> dict[str, int]:
        image = tokens_in(latent_shape, self.patch)
        return {"image": image, "text": text_tokens, "sequence": image + text_tokens}

    def call(self, transformer: nn.Module, x: Tensor, timestep: Tensor, cond: Mapping[str, Any]) -> Tensor:
        batch, _, height, width = x.shape
        text = rows(cond["c_crossattn"], batch)
        out = transformer(
            hidden_states=pad_to_patch(x, self.patch),
            timestep=1 - rows(timestep, batch),
            encoder_hidden_states=text,
            encoder_attention_mask=torch.ones(text.shape[:2], dtype=torch.bool, device=x.device),
            return_dict=False,
        )[0]
        return -out[..., :height, :width]


def _table(heads: int, kv_heads: int) -> Table:
    return Table(
        *(row for stack in ("layers", "noise_refiner", "context_refiner") for row in _block(stack, heads, kv_heads)),
        move("x_embedder.@", "x_embedder.@"),
        move("t_embedder.mlp.0.@", f"{EMBED}.timestep_embedder.linear_1.@"),
        move("t_embedder.mlp.2.@", f"{EMBED}.timestep_embedder.linear_2.@"),
        move("cap_embedder.0.weight", f"{EMBED}.caption_embedder.0.weight"),
        move("cap_embedder.1.@", f"{EMBED}.caption_embedder.1.@"),
        move("final_layer.adaLN_modulation.1.@", "norm_out.linear_1.@"),
        move("final_layer.linear.@", "norm_out.linear_2.@"),
        drop("norm_final.weight"),
    )
