"""FLUX.1 dev, schnell, fill and control: 2x2 patches, joint attention over text and image, distilled guidance.

Knows no diffusers. Its attention processor (FluxAttnProcessor) is context-parallel aware.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .base import Family, Shapes, axes_of, count, given, norm_width, rows
from .layout import grid, pad_to_patch, patchify, tokens_in, unpatchify
from .precision import TORCH_EPS, absent_as_zero, keep_timestep
from .table import Table, move, split, swap

DOUBLE, SINGLE, EMBED = "transformer_blocks.#", "single_transformer_blocks.#", "time_text_embed"
QKV = tuple(f"{DOUBLE}.attn.{name}.@" for name in ("to_q", "to_k", "to_v"))
ADDED_QKV = tuple(f"{DOUBLE}.attn.{name}.@" for name in ("add_q_proj", "add_k_proj", "add_v_proj"))
LINEAR1 = tuple(f"{SINGLE}.{name}.@" for name in ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"))
BLOCKS = (
    split("double_blocks.#.img_attn.qkv.@", *QKV),
    split("double_blocks.#.txt_attn.qkv.@", *ADDED_QKV),
    move("double_blocks.#.img_attn.norm.query_norm.weight", f"{DOUBLE}.attn.norm_q.weight"),
    move("double_blocks.#.img_attn.norm.key_norm.weight", f"{DOUBLE}.attn.norm_k.weight"),
    move("double_blocks.#.txt_attn.norm.query_norm.weight", f"{DOUBLE}.attn.norm_added_q.weight"),
    move("double_blocks.#.txt_attn.norm.key_norm.weight", f"{DOUBLE}.attn.norm_added_k.weight"),
    move("double_blocks.#.img_attn.proj.@", f"{DOUBLE}.attn.to_out.0.@"),
    move("double_blocks.#.txt_attn.proj.@", f"{DOUBLE}.attn.to_add_out.@"),
    move("double_blocks.#.img_mlp.0.@", f"{DOUBLE}.ff.net.0.proj.@"),
    move("double_blocks.#.img_mlp.2.@", f"{DOUBLE}.ff.net.2.@"),
    move("double_blocks.#.txt_mlp.0.@", f"{DOUBLE}.ff_context.net.0.proj.@"),
    move("double_blocks.#.txt_mlp.2.@", f"{DOUBLE}.ff_context.net.2.@"),
    split("single_blocks.#.linear1.@", *LINEAR1, parts=(1, 1, 1, 4)),
    move("single_blocks.#.linear2.@", f"{SINGLE}.proj_out.@"),
    move("single_blocks.#.norm.query_norm.weight", f"{SINGLE}.attn.norm_q.weight"),
    move("single_blocks.#.norm.key_norm.weight", f"{SINGLE}.attn.norm_k.weight"),
)
KEY_NORM = "double_blocks.0.img_attn.norm.key_norm"
QK_NORMS = {"*.attn.norm_q": TORCH_EPS, "*.attn.norm_k": TORCH_EPS, "*.attn.norm_added_?": TORCH_EPS}


class Flux(Family):
    name = "flux"
    transformer = "FluxTransformer2DModel"
    conditions = frozenset({"c_crossattn", "c_concat", "y", "guidance"})
    eps = QK_NORMS
    table = Table(
        *BLOCKS,
        move("img_in.@", "x_embedder.@"),
        move("txt_in.@", "context_embedder.@"),
        move("time_in.in_layer.@", f"{EMBED}.timestep_embedder.linear_1.@"),
        move("time_in.out_layer.@", f"{EMBED}.timestep_embedder.linear_2.@"),
        move("vector_in.in_layer.@", f"{EMBED}.text_embedder.linear_1.@"),
        move("vector_in.out_layer.@", f"{EMBED}.text_embedder.linear_2.@"),
        move("guidance_in.in_layer.@", f"{EMBED}.guidance_embedder.linear_1.@"),
        move("guidance_in.out_layer.@", f"{EMBED}.guidance_embedder.linear_2.@"),
        move("double_blocks.#.img_mod.lin.@", f"{DOUBLE}.norm1.linear.@"),
        move("double_blocks.#.txt_mod.lin.@", f"{DOUBLE}.norm1_context.linear.@"),
        move("single_blocks.#.modulation.lin.@", f"{SINGLE}.norm.linear.@"),
        swap("final_layer.adaLN_modulation.1.@", "norm_out.linear.@"),
        move("final_layer.linear.@", "proj_out.@"),
    )

    @staticmethod
    def matches(shapes: Shapes) -> bool:
        needed = ("img_in.weight", "vector_in.in_layer.weight", "double_blocks.0.img_mod.lin.weight")
        return all(name in shapes for name in needed) and norm_width(shapes, KEY_NORM) > 0

    def __init__(self, shapes: Shapes, hints: Mapping[str, Any]) -> None:
        head_dim = norm_width(shapes, KEY_NORM)
        self.double, self.single = count(shapes, "double_blocks"), count(shapes, "single_blocks")
        self.layers = self.double + self.single
        self.heads = shapes["img_in.weight"][0] // head_dim
        self._pooled = shapes["vector_in.in_layer.weight"][1]
        self._guided = "guidance_in.in_layer.weight" in shapes
        self._config = {
            "patch_size": 1,
            "in_channels": shapes["img_in.weight"][1],
            "out_channels": shapes["final_layer.linear.weight"][0],
            "num_layers": self.double,
            "num_single_layers": self.single,
            "attention_head_dim": head_dim,
            "num_attention_heads": self.heads,
            "joint_attention_dim": shapes["txt_in.weight"][1],
            "pooled_projection_dim": self._pooled,
            "guidance_embeds": self._guided,
            "axes_dims_rope": tuple(hints.get("axes_dim") or axes_of(head_dim)),
        }

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def prepare(self, transformer: nn.Module) -> None:
        super().prepare(transformer)
        embed: Any = transformer.time_text_embed
        keep_timestep(transformer, embed.time_proj, scale=1000)
        if self._guided:
            absent_as_zero(embed.guidance_embedder)

    def tokens(self, latent_shape: tuple[int, ...], text_tokens: int) -> dict[str, int]:
        return {"image": tokens_in(latent_shape, self.patch), "text": text_tokens}

    def call(self, transformer: nn.Module, x: Tensor, timestep: Tensor, cond: Mapping[str, Any]) -> Tensor:
        batch, _, height, width = x.shape
        padded = pad_to_patch(x, self.patch)
        full_height, full_width = padded.shape[-2:]
        text, pooled, guidance = cond["c_crossattn"], cond.get("y"), cond.get("guidance")
        out = transformer(
            hidden_states=patchify(padded, self.patch),
            encoder_hidden_states=rows(text, batch),
            pooled_projections=x.new_zeros(batch, self._pooled) if pooled is None else self._vector(pooled, batch),
            timestep=rows(timestep, batch),
            guidance=given(guidance, x) if self._guided else None,
            img_ids=grid(full_height // self.patch, full_width // self.patch, 3, x.device),
            txt_ids=grid(1, text.shape[1], 3, x.device) * 0,
            return_dict=False,
        )[0]
        return unpatchify(out, self.patch, full_height, full_width)[..., :height, :width]

    def _vector(self, pooled: Tensor, batch: int) -> Tensor:
        return rows(pooled[:, : self._pooled], batch)
