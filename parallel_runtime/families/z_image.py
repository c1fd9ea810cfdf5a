"""Z-Image: one stream of image and text tokens, both padded with learned tokens to multiples of 32.

Knows no diffusers. Its attention processor (ZSingleStreamAttnProcessor) is context-parallel aware, its class has no
plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .base import Family, Shapes, count, rows
from .layout import pad_to_patch, tokens_in
from .precision import TORCH_EPS
from .rope import rotations
from .table import Row, Table, drop, move, split

MULTIPLE = 32  # tokens
TIMESTEP_WIDTH = 1024  # diffusers' timestep network is this wide, ComfyUI's no wider than the model
STACKS = ("layers", "noise_refiner", "context_refiner")
NORMS = ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")
VARIANTS = ("dec_net.", "siglip_embedder.", "clip_text_pooled_proj.")  # pixel space, Omni, NewBie


def _block(stack: str) -> tuple[Row, ...]:
    block = f"{stack}.#"
    return (
        split(f"{block}.attention.qkv.@", *(f"{block}.attention.to_{n}.@" for n in "qkv")),
        move(f"{block}.attention.out.@", f"{block}.attention.to_out.0.@"),
        move(f"{block}.attention.q_norm.weight", f"{block}.attention.norm_q.weight"),
        move(f"{block}.attention.k_norm.weight", f"{block}.attention.norm_k.weight"),
        move(f"{block}.adaLN_modulation.0.@", f"{block}.adaLN_modulation.0.@"),
        *(move(f"{block}.feed_forward.{n}.@", f"{block}.feed_forward.{n}.@") for n in ("w1", "w2", "w3")),
        *(move(f"{block}.{n}.weight", f"{block}.{n}.weight") for n in NORMS),
    )


def _widened(source: str, dim: int) -> Row:
    """A layer of the timestep network with zeros for the units that it lacks: exact, since silu(0) is 0."""

    def widen(tensor: Tensor) -> tuple[Tensor]:
        missing = TIMESTEP_WIDTH - tensor.shape[dim]
        return (pad(tensor, (0, 0) * (tensor.ndim - 1 - dim) + (0, missing)) if missing else tensor,)

    return move(source, source)._replace(cut=widen)


class ZImage(Family):
    name = "z_image"
    transformer = "ZImageTransformer2DModel"
    conditions = frozenset({"c_crossattn", "attention_mask", "num_tokens"})  # ComfyUI lets all text tokens count
    eps: ClassVar = {"*.attention.norm_?": TORCH_EPS}
    table = Table(
        *(row for stack in STACKS for row in _block(stack)),
        move("x_embedder.@", "all_x_embedder.2-1.@"),
        move("final_layer.linear.@", "all_final_layer.2-1.linear.@"),
        move("final_layer.adaLN_modulation.1.@", "all_final_layer.2-1.adaLN_modulation.1.@"),
        move("cap_embedder.0.weight", "cap_embedder.0.weight"),
        move("cap_embedder.1.@", "cap_embedder.1.@"),
        _widened("t_embedder.mlp.0.weight", 0),
        _widened("t_embedder.mlp.0.bias", 0),
        _widened("t_embedder.mlp.2.weight", 1),
        move("t_embedder.mlp.2.bias", "t_embedder.mlp.2.bias"),
        move("x_pad_token", "x_pad_token"),
        move("cap_pad_token", "cap_pad_token"),
        drop("norm_final.weight"),
    )

    @staticmethod
    def matches(shapes: Shapes) -> bool:
        needed = {"cap_pad_token", "noise_refiner.0.attention.k_norm.weight", "layers.0.adaLN_modulation.0.weight"}
        return needed <= shapes.keys() and not any(name.startswith(VARIANTS) for name in shapes)

    def __init__(self, shapes: Shapes, hints: Mapping[str, Any]) -> None:
        dim, patches = shapes["x_embedder.weight"]
        head_dim = shapes["layers.0.attention.q_norm.weight"][0]
        refiners = count(shapes, "noise_refiner")
        self.layers = count(shapes, "layers")
        self.heads = dim // head_dim
        self._axes = tuple(hints.get("axes_dims") or (head_dim // 4, head_dim * 3 // 8, head_dim * 3 // 8))
        self._theta = float(hints.get("rope_theta") or 256.0)
        self._config: dict[str, Any] = {
            "all_patch_size": (self.patch,),
            "all_f_patch_size": (1,),
            "in_channels": patches // self.patch**2,
            "dim": dim,
            "n_layers": self.layers,
            "n_refiner_layers": refiners,
            "n_heads": self.heads,
            "n_kv_heads": self.heads,
            "cap_feat_dim": shapes["cap_embedder.1.weight"][1],
            "rope_theta": self._theta,
            "t_scale": float(hints.get("time_scale") or 1000.0),
            "axes_dims": list(self._axes),
            "axes_lens": [1] * len(self._axes),
        }

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def prepare(self, transformer: nn.Module) -> None:
        super().prepare(transformer)
        # diffusers' tables end at axes_lens and round the angles to float32
        transformer.rope_embedder = partial(rotations, dims=self._axes, theta=self._theta)  # type: ignore[assignment]

    def tokens(self, latent_shape: tuple[int, ...], text_tokens: int) -> dict[str, int]:
        image, text = (-(-n // MULTIPLE) * MULTIPLE for n in (tokens_in(latent_shape, self.patch), text_tokens))
        return {"image": image, "text": text, "sequence": image + text}

    def call(self, transformer: nn.Module, x: Tensor, timestep: Tensor, cond: Mapping[str, Any]) -> Tensor:
        batch, _, height, width = x.shape
        images = pad_to_patch(x, self.patch).unsqueeze(2)
        out = transformer(
            list(images),
            1 - rows(timestep, batch),
            list(rows(cond["c_crossattn"], batch)),
            return_dict=False,
        )[0]
        return -torch.stack(list(out)).squeeze(2)[..., :height, :width]
