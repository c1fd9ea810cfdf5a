"""Chroma: FLUX without pooled text, whose modulations all come from one small network fed by timestep and guidance.

Knows no diffusers. Its attention processor (FluxAttnProcessor) is context-parallel aware, its class has no plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .base import Family, Shapes, axes_of, count, norm_width, rows
from .flux import BLOCKS, KEY_NORM, QK_NORMS
from .layout import grid, pad_to_patch, patchify, tokens_in, unpatchify
from .precision import keep_timestep
from .table import Table, drop, move

GUIDER = "distilled_guidance_layer"
FOREIGN = ("nerf_blocks.", "img_in_patch.")  # Chroma Radiance, which works on pixels


class Chroma(Family):
    name = "chroma"
    transformer = "ChromaTransformer2DModel"
    conditions = frozenset({"c_crossattn", "y", "guidance"})  # like ComfyUI, it has no use for y
    eps = QK_NORMS
    table = Table(
        *BLOCKS,
        move("img_in.@", "x_embedder.@"),
        move("txt_in.@", "context_embedder.@"),
        move(f"{GUIDER}.in_proj.@", f"{GUIDER}.in_proj.@"),
        move(f"{GUIDER}.out_proj.@", f"{GUIDER}.out_proj.@"),
        move(f"{GUIDER}.layers.#.in_layer.@", f"{GUIDER}.layers.#.linear_1.@"),
        move(f"{GUIDER}.layers.#.out_layer.@", f"{GUIDER}.layers.#.linear_2.@"),
        move(f"{GUIDER}.norms.#.weight", f"{GUIDER}.norms.#.weight"),
        move("final_layer.linear.@", "proj_out.@"),
        drop("__x0__"),
    )

    @staticmethod
    def matches(shapes: Shapes) -> bool:
        ours = f"{GUIDER}.in_proj.weight" in shapes and "img_in.weight" in shapes
        return ours and not any(name.startswith(FOREIGN) for name in shapes)

    def __init__(self, shapes: Shapes, hints: Mapping[str, Any]) -> None:
        head_dim = norm_width(shapes, KEY_NORM)
        double, single = count(shapes, "double_blocks"), count(shapes, "single_blocks")
        self.layers = double + single
        self.heads = shapes["img_in.weight"][0] // head_dim
        self._config = {
            "patch_size": 1,
            "in_channels": shapes["img_in.weight"][1],
            "out_channels": shapes["final_layer.linear.weight"][0],
            "num_layers": double,
            "num_single_layers": single,
            "attention_head_dim": head_dim,
            "num_attention_heads": self.heads,
            "joint_attention_dim": shapes["txt_in.weight"][1],
            "axes_dims_rope": tuple(hints.get("axes_dim") or axes_of(head_dim)),
            "approximator_num_channels": shapes[f"{GUIDER}.in_proj.weight"][1],
            "approximator_hidden_dim": shapes[f"{GUIDER}.in_proj.weight"][0],
            "approximator_layers": count(shapes, f"{GUIDER}.layers"),
        }

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def prepare(self, transformer: nn.Module) -> None:
        super().prepare(transformer)
        embed: Any = transformer.time_text_embed
        keep_timestep(transformer, embed.time_proj, scale=1000)
        embed.guidance_proj = GivenGuidance(embed.guidance_proj)

    def tokens(self, latent_shape: tuple[int, ...], text_tokens: int) -> dict[str, int]:
        return {"image": tokens_in(latent_shape, self.patch), "text": text_tokens}

    def call(self, transformer: nn.Module, x: Tensor, timestep: Tensor, cond: Mapping[str, Any]) -> Tensor:
        batch, _, height, width = x.shape
        padded = pad_to_patch(x, self.patch)
        full_height, full_width = padded.shape[-2:]
        text, guidance = rows(cond["c_crossattn"], batch), cond.get("guidance")
        embed: Any = transformer.time_text_embed
        embed.guidance_proj.guidance = None if guidance is None else rows(guidance, batch)
        out = transformer(
            hidden_states=patchify(padded, self.patch),
            encoder_hidden_states=text,
            timestep=rows(timestep, batch),
            img_ids=grid(full_height // self.patch, full_width // self.patch, 3, x.device),
            txt_ids=grid(1, text.shape[1], 3, x.device) * 0,
            return_dict=False,
        )[0]
        return unpatchify(out, self.patch, full_height, full_width)[..., :height, :width]


class GivenGuidance(nn.Module):
    """The sinusoid of a guidance set from outside: diffusers' own always embeds zero, ComfyUI what it is given."""

    def __init__(self, sinusoid: nn.Module) -> None:
        super().__init__()
        self.sinusoid = sinusoid
        self.guidance: Tensor | None = None

    def forward(self, zeros: Tensor) -> Tensor:
        return self.sinusoid(zeros if self.guidance is None else self.guidance * 1000)
