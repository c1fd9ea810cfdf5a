"""FLUX.2 dev and Klein: tokens of one latent pixel, modulation shared by all blocks, four position axes.

Knows no diffusers. Its attention processors (Flux2AttnProcessor, Flux2ParallelSelfAttnProcessor) are context-parallel
aware.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .base import Family, Shapes, count, norm_width, rows
from .flux import ADDED_QKV, DOUBLE, KEY_NORM, QK_NORMS, QKV, SINGLE
from .layout import grid, patchify, tokens_in, unpatchify
from .precision import keep_timestep
from .table import Table, move, split, swap

EMBED = "time_guidance_embed"
THETA = 2000


class Flux2(Family):
    name = "flux2"
    transformer = "Flux2Transformer2DModel"
    conditions = frozenset({"c_crossattn", "y", "guidance"})  # like ComfyUI, it has no use for y
    patch = 1
    eps = QK_NORMS
    table = Table(
        split("double_blocks.#.img_attn.qkv.@", *QKV),
        split("double_blocks.#.txt_attn.qkv.@", *ADDED_QKV),
        move("double_blocks.#.img_attn.norm.query_norm.weight", f"{DOUBLE}.attn.norm_q.weight"),
        move("double_blocks.#.img_attn.norm.key_norm.weight", f"{DOUBLE}.attn.norm_k.weight"),
        move("double_blocks.#.txt_attn.norm.query_norm.weight", f"{DOUBLE}.attn.norm_added_q.weight"),
        move("double_blocks.#.txt_attn.norm.key_norm.weight", f"{DOUBLE}.attn.norm_added_k.weight"),
        move("double_blocks.#.img_attn.proj.@", f"{DOUBLE}.attn.to_out.0.@"),
        move("double_blocks.#.txt_attn.proj.@", f"{DOUBLE}.attn.to_add_out.@"),
        move("double_blocks.#.img_mlp.0.@", f"{DOUBLE}.ff.linear_in.@"),
        move("double_blocks.#.img_mlp.2.@", f"{DOUBLE}.ff.linear_out.@"),
        move("double_blocks.#.txt_mlp.0.@", f"{DOUBLE}.ff_context.linear_in.@"),
        move("double_blocks.#.txt_mlp.2.@", f"{DOUBLE}.ff_context.linear_out.@"),
        move("single_blocks.#.linear1.@", f"{SINGLE}.attn.to_qkv_mlp_proj.@"),
        move("single_blocks.#.linear2.@", f"{SINGLE}.attn.to_out.@"),
        move("single_blocks.#.norm.query_norm.weight", f"{SINGLE}.attn.norm_q.weight"),
        move("single_blocks.#.norm.key_norm.weight", f"{SINGLE}.attn.norm_k.weight"),
        move("img_in.@", "x_embedder.@"),
        move("txt_in.@", "context_embedder.@"),
        move("time_in.in_layer.@", f"{EMBED}.timestep_embedder.linear_1.@"),
        move("time_in.out_layer.@", f"{EMBED}.timestep_embedder.linear_2.@"),
        move("guidance_in.in_layer.@", f"{EMBED}.guidance_embedder.linear_1.@"),
        move("guidance_in.out_layer.@", f"{EMBED}.guidance_embedder.linear_2.@"),
        move("double_stream_modulation_img.lin.@", "double_stream_modulation_img.linear.@"),
        move("double_stream_modulation_txt.lin.@", "double_stream_modulation_txt.linear.@"),
        move("single_stream_modulation.lin.@", "single_stream_modulation.linear.@"),
        swap("final_layer.adaLN_modulation.1.@", "norm_out.linear.@"),
        move("final_layer.linear.@", "proj_out.@"),
    )

    @staticmethod
    def matches(shapes: Shapes) -> bool:
        needed = {"double_stream_modulation_img.lin.weight", "img_in.weight", "txt_in.weight"}
        return needed <= shapes.keys()

    def __init__(self, shapes: Shapes, hints: Mapping[str, Any]) -> None:
        head_dim = norm_width(shapes, KEY_NORM)
        dim, channels = shapes["img_in.weight"]
        double, single = count(shapes, "double_blocks"), count(shapes, "single_blocks")
        self.layers = double + single
        self.heads = dim // head_dim
        self._guided = "guidance_in.in_layer.weight" in shapes
        self._axes = tuple(hints.get("axes_dim") or [head_dim // 4] * 4)
        self._config: dict[str, Any] = {
            "patch_size": self.patch,
            "in_channels": channels,
            "out_channels": shapes["final_layer.linear.weight"][0],
            "num_layers": double,
            "num_single_layers": single,
            "attention_head_dim": head_dim,
            "num_attention_heads": self.heads,
            "joint_attention_dim": shapes["txt_in.weight"][1],
            "timestep_guidance_channels": shapes["time_in.in_layer.weight"][1],
            "mlp_ratio": shapes["double_blocks.0.img_mlp.2.weight"][1] / dim,
            "axes_dims_rope": self._axes,
            "rope_theta": int(hints.get("theta") or THETA),
            "guidance_embeds": self._guided,
        }

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def prepare(self, transformer: nn.Module) -> None:
        super().prepare(transformer)
        embed: Any = transformer.time_guidance_embed
        keep_timestep(transformer, embed.time_proj, scale=1000)

    def tokens(self, latent_shape: tuple[int, ...], text_tokens: int) -> dict[str, int]:
        return {"image": tokens_in(latent_shape, self.patch), "text": text_tokens}

    def call(self, transformer: nn.Module, x: Tensor, timestep: Tensor, cond: Mapping[str, Any]) -> Tensor:
        batch, _, height, width = x.shape
        text, guidance = rows(cond["c_crossattn"], batch), cond.get("guidance")
        places = torch.zeros(text.shape[1], len(self._axes), device=x.device)
        places[:, -1] = torch.arange(text.shape[1], device=x.device)
        out = transformer(
            hidden_states=patchify(x, self.patch),
            encoder_hidden_states=text,
            timestep=rows(timestep, batch),
            img_ids=grid(height, width, len(self._axes), x.device)[None],
            txt_ids=places[None],
            guidance=rows(guidance, batch) if self._guided and guidance is not None else None,
            return_dict=False,
        )[0]
        return unpatchify(out, self.patch, height, width)
