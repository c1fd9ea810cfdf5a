"""LTX-Video: tokens of one latent pixel, positions in pixels and seconds, text by cross-attention.

Knows no diffusers. Its attention processor (LTXVideoAttnProcessor) is context-parallel aware.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Refused
from .base import Family, Shapes, count, rows
from .layout import patchify, tokens_in, unpatchify
from .table import Row, Table, move
from .text import check_mask, without_padding

HEADS = 32
BLOCK = "transformer_blocks.#"
PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0")
VAE = (8, 32, 32)  # frames, rows and columns of pixels a latent pixel
REACH = (20, 2048, 2048)  # positions are fractions of these, in diffusers always
FPS = 25
ELSEWHERE = {"rope_type": "interleaved", "frequencies_precision": "float32", "use_middle_indices_grid": False}
VARIANTS = ("audio_adaln_single.", "prompt_adaln_single.", "keyframes_abs_pos_embedding")  # LTX-2 and later


def _attention(name: str) -> tuple[Row, ...]:
    return (
        *(move(f"{BLOCK}.{name}.{part}.@", f"{BLOCK}.{name}.{part}.@") for part in PROJECTIONS),
        move(f"{BLOCK}.{name}.q_norm.weight", f"{BLOCK}.{name}.norm_q.weight"),
        move(f"{BLOCK}.{name}.k_norm.weight", f"{BLOCK}.{name}.norm_k.weight"),
    )


class LTXV(Family):
    name = "ltxv"
    transformer = "LTXVideoTransformer3DModel"
    conditions = frozenset({"c_crossattn", "attention_mask", "frame_rate", "denoise_mask"})
    patch = 1
    table = Table(
        *_attention("attn1"),
        *_attention("attn2"),
        move(f"{BLOCK}.ff.net.0.proj.@", f"{BLOCK}.ff.net.0.proj.@"),
        move(f"{BLOCK}.ff.net.2.@", f"{BLOCK}.ff.net.2.@"),
        move(f"{BLOCK}.scale_shift_table", f"{BLOCK}.scale_shift_table"),
        move("scale_shift_table", "scale_shift_table"),
        move("patchify_proj.@", "proj_in.@"),
        move("adaln_single.emb.timestep_embedder.linear_1.@", "time_embed.emb.timestep_embedder.linear_1.@"),
        move("adaln_single.emb.timestep_embedder.linear_2.@", "time_embed.emb.timestep_embedder.linear_2.@"),
        move("adaln_single.linear.@", "time_embed.linear.@"),
        move("caption_projection.linear_1.@", "caption_projection.linear_1.@"),
        move("caption_projection.linear_2.@", "caption_projection.linear_2.@"),
        move("proj_out.@", "proj_out.@"),
    )

    @staticmethod
    def matches(shapes: Shapes) -> bool:
        needed = {"patchify_proj.weight", "adaln_single.emb.timestep_embedder.linear_1.bias"}
        return needed <= shapes.keys() and not any(name.startswith(VARIANTS) for name in shapes)

    def __init__(self, shapes: Shapes, hints: Mapping[str, Any]) -> None:
        for name, ours in ELSEWHERE.items():
            if (found := hints.get(name, ours)) != ours:
                raise Refused(f"this LTX-Video model says {name}={found}; only {ours} is known here")
        dim, channels = shapes["patchify_proj.weight"]
        self.layers = count(shapes, "transformer_blocks")
        self.heads = int(hints.get("num_attention_heads") or HEADS)
        self._causal = bool(hints.get("causal_temporal_positioning"))
        self._vae = tuple(hints.get("vae_scale_factors") or VAE)
        self._reach = tuple(hints.get("positional_embedding_max_pos") or REACH)
        self._timestep_scale = float(hints.get("timestep_scale_multiplier") or 1000.0)
        self._config: dict[str, Any] = {
            "in_channels": channels,
            "out_channels": shapes["proj_out.weight"][0],
            "num_attention_heads": self.heads,
            "attention_head_dim": dim // self.heads,
            "cross_attention_dim": shapes["transformer_blocks.0.attn2.to_k.weight"][1],
            "num_layers": self.layers,
            "caption_channels": shapes["caption_projection.linear_1.weight"][1],
        }

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def tokens(self, latent_shape: tuple[int, ...], text_tokens: int) -> dict[str, int]:
        return {"image": tokens_in(latent_shape, self.patch), "text": text_tokens}

    def check(self, latent_shape: tuple[int, ...], cond: Mapping[str, Any]) -> None:
        check_mask(cond)

    def call(self, transformer: nn.Module, x: Tensor, timestep: Tensor, cond: Mapping[str, Any]) -> Tensor:
        batch, _, frames, height, width = x.shape
        text, mask = without_padding(rows(cond["c_crossattn"], batch), cond.get("attention_mask"))
        scaled = rows(timestep, batch).reshape(batch, -1) * self._timestep_scale
        out = transformer(
            hidden_states=patchify(x, self.patch),
            encoder_hidden_states=text,
            timestep=scaled.flatten() if scaled.shape[1] == 1 else scaled,
            encoder_attention_mask=mask,
            video_coords=self._places(x, float(cond.get("frame_rate") or FPS)),
            return_dict=False,
        )[0]
        return unpatchify(out, self.patch, height, width, frames)

    def _places(self, x: Tensor, frame_rate: float) -> Tensor:
        """Seconds, row and column of each token, [B, 3, T H W], float32."""
        axes = [torch.arange(n, device=x.device) * scale for n, scale in zip(x.shape[2:], self._vae, strict=True)]
        if self._causal:  # the first latent frame is one frame of pixels
            axes[0] = (axes[0] + 1 - self._vae[0]).clamp(min=0)
        places = torch.cartesian_prod(*axes).T.float()
        places[0] *= 1 / frame_rate
        rescale = torch.tensor([known / ours for known, ours in zip(REACH, self._reach, strict=True)], device=x.device)
        return (places * rescale[:, None]).expand(x.shape[0], -1, -1)
