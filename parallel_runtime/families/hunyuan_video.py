"""HunyuanVideo: 1x2x2 patches, joint attention over image and refined text, distilled guidance.

Knows no diffusers. Its attention processor (HunyuanVideoAttnProcessor2_0) is context-parallel aware, its class has no
plan; the text refiner's is not aware, and runs whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .base import Family, Shapes, axes_of, count, given, rows
from .flux import BLOCKS, DOUBLE, QK_NORMS, SINGLE
from .layout import pad_to_patch, tokens_in
from .precision import absent_as_zero
from .table import Table, move, split, swap
from .text import check_mask, without_padding

EMBED, REFINER = "time_text_embed", "context_embedder"
THEIR_REFINER, REFINED = "txt_in.individual_token_refiner.blocks.#", f"{REFINER}.token_refiner.refiner_blocks.#"
VARIANTS = ("byt5_in.", "vision_in.", "time_r_in.", "cond_type_embedding.")  # HunyuanVideo 1.5, HunyuanImage
COMFY_NAMES = (  # Tencent's names to ComfyUI's, in this order
    (r"txt_in\.(.)_embedder\.(mlp\.0|linear_1)\.", r"txt_in.\1_embedder.in_layer."),
    (r"txt_in\.(.)_embedder\.(mlp\.2|linear_2)\.", r"txt_in.\1_embedder.out_layer."),
    (r"_mod\.linear\.", "_mod.lin."),
    (r"_attn_(qkv|proj)\.", r"_attn.\1."),
    (r"mlp\.fc1\.", "mlp.0."),
    (r"mlp\.fc2\.", "mlp.2."),
    (r"[._]q_norm\.", ".norm.query_norm."),
    (r"[._]k_norm\.", ".norm.key_norm."),
    (r"\.modulation\.linear\.", ".modulation.lin."),
    (r"_in\.mlp\.0\.", "_in.in_layer."),
    (r"_in\.mlp\.2\.", "_in.out_layer."),
)


class HunyuanVideo(Family):
    name = "hunyuan_video"
    transformer = "HunyuanVideoTransformer3DModel"
    conditions = frozenset({"c_crossattn", "c_concat", "y", "guidance", "attention_mask"})
    eps: ClassVar = QK_NORMS
    table = Table(
        *BLOCKS,
        move("double_blocks.#.img_mod.lin.@", f"{DOUBLE}.norm1.linear.@"),
        move("double_blocks.#.txt_mod.lin.@", f"{DOUBLE}.norm1_context.linear.@"),
        move("single_blocks.#.modulation.lin.@", f"{SINGLE}.norm.linear.@"),
        move("img_in.proj.@", "x_embedder.proj.@"),
        move("time_in.in_layer.@", f"{EMBED}.timestep_embedder.linear_1.@"),
        move("time_in.out_layer.@", f"{EMBED}.timestep_embedder.linear_2.@"),
        move("vector_in.in_layer.@", f"{EMBED}.text_embedder.linear_1.@"),
        move("vector_in.out_layer.@", f"{EMBED}.text_embedder.linear_2.@"),
        move("guidance_in.in_layer.@", f"{EMBED}.guidance_embedder.linear_1.@"),
        move("guidance_in.out_layer.@", f"{EMBED}.guidance_embedder.linear_2.@"),
        move("txt_in.input_embedder.@", f"{REFINER}.proj_in.@"),
        move("txt_in.t_embedder.in_layer.@", f"{REFINER}.{EMBED}.timestep_embedder.linear_1.@"),
        move("txt_in.t_embedder.out_layer.@", f"{REFINER}.{EMBED}.timestep_embedder.linear_2.@"),
        move("txt_in.c_embedder.in_layer.@", f"{REFINER}.{EMBED}.text_embedder.linear_1.@"),
        move("txt_in.c_embedder.out_layer.@", f"{REFINER}.{EMBED}.text_embedder.linear_2.@"),
        move(f"{THEIR_REFINER}.norm1.@", f"{REFINED}.norm1.@"),
        move(f"{THEIR_REFINER}.norm2.@", f"{REFINED}.norm2.@"),
        split(f"{THEIR_REFINER}.self_attn.qkv.@", *(f"{REFINED}.attn.to_{n}.@" for n in "qkv")),
        move(f"{THEIR_REFINER}.self_attn.proj.@", f"{REFINED}.attn.to_out.0.@"),
        move(f"{THEIR_REFINER}.mlp.0.@", f"{REFINED}.ff.net.0.proj.@"),
        move(f"{THEIR_REFINER}.mlp.2.@", f"{REFINED}.ff.net.2.@"),
        move(f"{THEIR_REFINER}.adaLN_modulation.1.@", f"{REFINED}.norm_out.linear.@"),
        swap("final_layer.adaLN_modulation.1.@", "norm_out.linear.@"),
        move("final_layer.linear.@", "proj_out.@"),
    )

    @staticmethod
    def matches(shapes: Shapes) -> bool:
        needed = {"txt_in.individual_token_refiner.blocks.0.norm1.weight", "img_in.proj.weight"}
        ours = needed <= shapes.keys() and any(name.startswith("vector_in.") for name in shapes)
        return ours and not any(name.startswith(VARIANTS) for name in shapes)

    @staticmethod
    def comfy_name(name: str) -> str:
        for pattern, replacement in COMFY_NAMES:
            name = re.sub(pattern, replacement, name)
        return Family.comfy_name(name)

    def __init__(self, shapes: Shapes, hints: Mapping[str, Any]) -> None:
        shapes = {self.comfy_name(name): shape for name, shape in shapes.items()}
        dim, channels, *patch = shapes["img_in.proj.weight"]
        head_dim = shapes["double_blocks.0.img_attn.norm.query_norm.weight"][0]
        double, single = count(shapes, "double_blocks"), count(shapes, "single_blocks")
        self.layers = double + single
        self.heads = dim // head_dim
        self._guided = "guidance_in.in_layer.weight" in shapes
        self._pooled = shapes["vector_in.in_layer.weight"][1]
        self._text_mean: Tensor | None = None  # these two are of the call in progress
        self._masked = False
        self._config: dict[str, Any] = {
            "in_channels": channels,
            "out_channels": shapes["final_layer.linear.weight"][0] // (patch[0] * patch[1] * patch[2]),
            "num_attention_heads": self.heads,
            "attention_head_dim": head_dim,
            "num_layers": double,
            "num_single_layers": single,
            "num_refiner_layers": count(shapes, "txt_in.individual_token_refiner.blocks"),
            "mlp_ratio": shapes["double_blocks.0.img_mlp.0.weight"][0] / dim,
            "patch_size": patch[1],
            "patch_size_t": patch[0],
            "guidance_embeds": self._guided,
            "text_embed_dim": shapes["txt_in.input_embedder.weight"][1],
            "pooled_projection_dim": self._pooled,
            "rope_theta": float(hints.get("theta") or 256.0),
            "rope_axes_dim": tuple(hints.get("axes_dim") or axes_of(head_dim)),
        }

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def prepare(self, transformer: nn.Module) -> None:
        super().prepare(transformer)
        if self._guided:
            absent_as_zero(transformer.time_text_embed.guidance_embedder)  # type: ignore[union-attr, arg-type]
        refiner: Any = transformer.context_embedder
        # ComfyUI's mean of the text counts the padding, diffusers' does not
        refiner.time_text_embed.register_forward_pre_hook(lambda _, args: (args[0], self._text_mean))
        for block in (*transformer.transformer_blocks, *transformer.single_transformer_blocks):  # type: ignore[misc]
            block.register_forward_pre_hook(self._without_idle_mask)

    def _without_idle_mask(self, block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """diffusers always masks; a mask that hides nothing would only keep attention from its fast kernels."""
        return args if self._masked else (*args[:3], None, *args[4:])

    def tokens(self, latent_shape: tuple[int, ...], text_tokens: int) -> dict[str, int]:
        return {"image": tokens_in(latent_shape, self.patch), "text": text_tokens}

    def check(self, latent_shape: tuple[int, ...], cond: Mapping[str, Any]) -> None:
        check_mask(cond)

    def call(self, transformer: nn.Module, x: Tensor, timestep: Tensor, cond: Mapping[str, Any]) -> Tensor:
        batch, _, _, height, width = x.shape
        text = rows(cond["c_crossattn"], batch)
        self._text_mean = text.sum(dim=1) / text.shape[1]
        text, mask = without_padding(text, cond.get("attention_mask"))
        self._masked = mask is not None
        out = transformer(
            hidden_states=pad_to_patch(x, self.patch),
            timestep=rows(timestep, batch),
            encoder_hidden_states=text,
            encoder_attention_mask=text.new_ones(text.shape[:2], dtype=torch.bool) if mask is None else mask,
            pooled_projections=rows(cond["y"][:, : self._pooled], batch),
            guidance=given(cond.get("guidance"), x) * 1000 if self._guided else None,
            return_dict=False,
        )[0]
        return out[..., :height, :width]
