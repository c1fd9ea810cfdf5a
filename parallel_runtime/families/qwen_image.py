"""Qwen-Image: 2x2 patches, joint attention over text and image, positions centred on the image.

Knows no diffusers. Its attention processor (QwenDoubleStreamAttnProcessor2_0) is context-parallel aware.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .base import Family, Shapes, axes_of, count, rows
from .layout import pad_to_patch, patchify, tokens_in, unpatchify
from .precision import keep_timestep
from .rope import rotations
from .table import Table, drop
from .text import check_mask, without_padding

LAYER_INDEX = "time_text_embed.addition_t_embedding.weight"


class QwenImage(Family):
    name = "qwen_image"
    transformer = "QwenImageTransformer2DModel"
    conditions = frozenset({"c_crossattn", "attention_mask", "additional_t_cond"})
    table = Table(drop("__index_timestep_zero__"))  # ComfyUI's names are diffusers' names

    @staticmethod
    def matches(shapes: Shapes) -> bool:
        return {"txt_norm.weight", "transformer_blocks.0.img_mod.1.weight"} <= shapes.keys()

    def __init__(self, shapes: Shapes, hints: Mapping[str, Any]) -> None:
        head_dim = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
        self.heads = shapes["img_in.weight"][0] // head_dim
        self.layers = count(shapes, "transformer_blocks")
        self._layered = LAYER_INDEX in shapes
        self._config: dict[str, Any] = {
            "patch_size": self.patch,
            "in_channels": shapes["img_in.weight"][1],
            "out_channels": shapes["proj_out.weight"][0] // self.patch**2,
            "num_layers": self.layers,
            "attention_head_dim": head_dim,
            "num_attention_heads": self.heads,
            "joint_attention_dim": shapes["txt_norm.weight"][0],
            "axes_dims_rope": tuple(hints.get("axes_dims_rope") or axes_of(head_dim)),
            "use_additional_t_cond": self._layered,
        }

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def prepare(self, transformer: nn.Module) -> None:
        super().prepare(transformer)
        embed: Any = transformer.time_text_embed
        keep_timestep(transformer, embed.time_proj)
        transformer.pos_embed = CentredRope(self._config["axes_dims_rope"])

    def tokens(self, latent_shape: tuple[int, ...], text_tokens: int) -> dict[str, int]:
        return {"image": tokens_in(latent_shape, self.patch), "text": text_tokens}

    def check(self, latent_shape: tuple[int, ...], cond: Mapping[str, Any]) -> None:
        check_mask(cond)

    def call(self, transformer: nn.Module, x: Tensor, timestep: Tensor, cond: Mapping[str, Any]) -> Tensor:
        batch, _, frames, height, width = x.shape
        padded = pad_to_patch(x, self.patch)
        full_height, full_width = padded.shape[-2:]
        text, mask = without_padding(rows(cond["c_crossattn"], batch), cond.get("attention_mask"))
        out = transformer(
            hidden_states=patchify(padded, self.patch),
            encoder_hidden_states=text,
            encoder_hidden_states_mask=mask,
            timestep=rows(timestep, batch),
            img_shapes=(frames, full_height // self.patch, full_width // self.patch),
            additional_t_cond=self._layer(cond.get("additional_t_cond"), x) if self._layered else None,
            return_dict=False,
        )[0]
        return unpatchify(out, self.patch, full_height, full_width, frames)[..., :height, :width]

    def _layer(self, index: Tensor | None, x: Tensor) -> Tensor:
        if index is None:
            return torch.zeros(x.shape[0], dtype=torch.long, device=x.device)
        return rows(index, x.shape[0]).long()


class CentredRope(nn.Module):
    """ComfyUI's positions: rows and columns count from minus half the size (rounded down), the text starts at half.

    diffusers rounds that half up, so that images with an odd number of tokens a side sit elsewhere than in ComfyUI.
    """

    def __init__(self, axes: tuple[int, ...], theta: float = 10000.0) -> None:
        super().__init__()
        self.axes, self.theta = axes, theta

    def forward(
        self, size: tuple[int, int, int], max_txt_seq_len: int, device: torch.device | None = None
    ) -> tuple[Tensor, Tensor]:
        """`size` is (frames, rows, columns) in tokens.

        Returns rotations, complex64: of the image [frames rows columns, head/2], of the text [max_txt_seq_len, head/2].
        """
        starts = (0, -(size[1] // 2), -(size[2] // 2))
        places = [torch.arange(start, start + n, device=device) for start, n in zip(starts, size, strict=True)]
        image = torch.cartesian_prod(*places)
        first = max(size[1] // 2, size[2] // 2)
        text = torch.arange(first, first + max_txt_seq_len, device=device)[:, None].expand(-1, 3)
        return rotations(image, self.axes, self.theta), rotations(text, self.axes, self.theta)
