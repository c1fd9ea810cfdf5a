"""Stable Diffusion 3 and 3.5: 2x2 patches with learned positions, joint attention, dual attention in 3.5 medium.

Knows no diffusers. Its attention processor (JointAttnProcessor2_0) is not context-parallel aware, the engine has one
that is; its class has no plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .base import Family, Shapes, count, rows
from .layout import pad_to_patch, tokens_in
from .table import Row, Table, move, split, swap

BLOCK, EMBED = "transformer_blocks.#", "time_text_embed"
THEIRS = "joint_blocks.#"


def _attention(source: str, target: str, projections: tuple[str, str, str], norms: tuple[str, str]) -> tuple[Row, ...]:
    return (
        split(f"{source}.qkv.@", *(f"{target}.{name}.@" for name in projections)),
        move(f"{source}.ln_q.weight", f"{target}.{norms[0]}.weight"),
        move(f"{source}.ln_k.weight", f"{target}.{norms[1]}.weight"),
    )


class SD3(Family):
    name = "sd3"
    transformer = "SD3Transformer2DModel"
    conditions = frozenset({"c_crossattn", "y"})

    @staticmethod
    def matches(shapes: Shapes) -> bool:
        needed = {"joint_blocks.0.context_block.attn.qkv.weight", "pos_embed", "context_embedder.weight"}
        return needed <= shapes.keys() and not any(name.startswith("context_processor.") for name in shapes)

    def __init__(self, shapes: Shapes, hints: Mapping[str, Any]) -> None:
        dim, channels, self.patch = shapes["x_embedder.proj.weight"][:3]  # type: ignore[misc]
        self.layers = count(shapes, "joint_blocks")
        self.heads = dim // 64
        self._positions = round(shapes["pos_embed"][1] ** 0.5)  # a side
        self.table = _table(self.layers)
        dual = [i for i in range(self.layers) if f"joint_blocks.{i}.x_block.attn2.qkv.weight" in shapes]
        normed = "joint_blocks.0.x_block.attn.ln_q.weight" in shapes
        self._config: dict[str, Any] = {
            "sample_size": self.patch * self._positions,
            "patch_size": self.patch,
            "in_channels": channels,
            "num_layers": self.layers,
            "attention_head_dim": dim // self.heads,
            "num_attention_heads": self.heads,
            "joint_attention_dim": shapes["context_embedder.weight"][1],
            "caption_projection_dim": shapes["context_embedder.weight"][0],
            "pooled_projection_dim": shapes["y_embedder.mlp.0.weight"][1],
            "out_channels": shapes["final_layer.linear.weight"][0] // self.patch**2,
            "pos_embed_max_size": self._positions,
            "dual_attention_layers": tuple(dual),
            "qk_norm": "rms_norm" if normed else None,
        }

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def tokens(self, latent_shape: tuple[int, ...], text_tokens: int) -> dict[str, int]:
        return {"image": tokens_in(latent_shape, self.patch), "text": text_tokens}

    def check(self, latent_shape: tuple[int, ...], cond: Mapping[str, Any]) -> None:
        height, width = latent_shape[-2:]
        if max(height, width) > (side := self.patch * self._positions):
            raise ValueError(f"this SD3 model knows {side} latent pixels a side, the latent has {height} x {width}; "
                             "take a smaller one")  # fmt: skip

    def call(self, transformer: nn.Module, x: Tensor, timestep: Tensor, cond: Mapping[str, Any]) -> Tensor:
        batch, _, height, width = x.shape
        out = transformer(
            hidden_states=pad_to_patch(x, self.patch),
            encoder_hidden_states=rows(cond["c_crossattn"], batch),
            pooled_projections=rows(cond["y"], batch),
            timestep=rows(timestep, batch),
            return_dict=False,
        )[0]
        return out[..., :height, :width]


def _table(layers: int) -> Table:
    last = f"joint_blocks.{layers - 1}.context_block.adaLN_modulation.1.@"
    return Table(
        swap(last, f"transformer_blocks.{layers - 1}.norm1_context.linear.@"),  # it has no gates, only shift and scale
        *_attention(f"{THEIRS}.x_block.attn", f"{BLOCK}.attn", ("to_q", "to_k", "to_v"), ("norm_q", "norm_k")),
        *_attention(f"{THEIRS}.x_block.attn2", f"{BLOCK}.attn2", ("to_q", "to_k", "to_v"), ("norm_q", "norm_k")),
        *_attention(
            f"{THEIRS}.context_block.attn",
            f"{BLOCK}.attn",
            ("add_q_proj", "add_k_proj", "add_v_proj"),
            ("norm_added_q", "norm_added_k"),
        ),
        move(f"{THEIRS}.x_block.attn.proj.@", f"{BLOCK}.attn.to_out.0.@"),
        move(f"{THEIRS}.x_block.attn2.proj.@", f"{BLOCK}.attn2.to_out.0.@"),
        move(f"{THEIRS}.context_block.attn.proj.@", f"{BLOCK}.attn.to_add_out.@"),
        move(f"{THEIRS}.x_block.adaLN_modulation.1.@", f"{BLOCK}.norm1.linear.@"),
        move(f"{THEIRS}.context_block.adaLN_modulation.1.@", f"{BLOCK}.norm1_context.linear.@"),
        move(f"{THEIRS}.x_block.mlp.fc1.@", f"{BLOCK}.ff.net.0.proj.@"),
        move(f"{THEIRS}.x_block.mlp.fc2.@", f"{BLOCK}.ff.net.2.@"),
        move(f"{THEIRS}.context_block.mlp.fc1.@", f"{BLOCK}.ff_context.net.0.proj.@"),
        move(f"{THEIRS}.context_block.mlp.fc2.@", f"{BLOCK}.ff_context.net.2.@"),
        move("x_embedder.proj.@", "pos_embed.proj.@"),
        move("pos_embed", "pos_embed.pos_embed"),
        move("t_embedder.mlp.0.@", f"{EMBED}.timestep_embedder.linear_1.@"),
        move("t_embedder.mlp.2.@", f"{EMBED}.timestep_embedder.linear_2.@"),
        move("y_embedder.mlp.0.@", f"{EMBED}.text_embedder.linear_1.@"),
        move("y_embedder.mlp.2.@", f"{EMBED}.text_embedder.linear_2.@"),
        move("context_embedder.@", "context_embedder.@"),
        swap("final_layer.adaLN_modulation.1.@", "norm_out.linear.@"),
        move("final_layer.linear.@", "proj_out.@"),
    )
