"""Wan 2.1 and 2.2: text to video, image to video (CLIP image tokens or channels beside the noise), 5B.

Knows no diffusers. Its attention processor (WanAttnProcessor) is context-parallel aware in self-attention; the keys
and values of cross-attention are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .base import Family, Shapes, count, rows
from .layout import pad_to_patch, tokens_in
from .precision import compute_in_float32
from .table import Table, move

B, EMBED = "blocks.#", "condition_embedder"
VARIANTS = (  # Wan with more inputs than ours: VACE, camera, S2V, HuMo, Animate, SCAIL, dancer, Fun control
    "vace_patch_embedding.weight", "control_adapter.conv.weight", "casual_audio_encoder.encoder.final_linear.weight",
    "audio_proj.audio_proj_glob_1.layer.bias", "face_adapter.fuser_blocks.0.k_norm.weight",
    "patch_embedding_mask.weight", "patch_embedding_pose.weight", "patch_embedding_global.weight", "ref_conv.weight",
)  # fmt: skip


def _attention(theirs: str, ours: str) -> tuple[Any, ...]:
    return (
        *(move(f"{B}.{theirs}.{n}.@", f"{B}.{ours}.to_{n}.@") for n in "qkv"),
        move(f"{B}.{theirs}.o.@", f"{B}.{ours}.to_out.0.@"),
        move(f"{B}.{theirs}.norm_q.weight", f"{B}.{ours}.norm_q.weight"),
        move(f"{B}.{theirs}.norm_k.weight", f"{B}.{ours}.norm_k.weight"),
    )


class Wan(Family):
    name = "wan"
    transformer = "WanTransformer3DModel"
    conditions = frozenset({"c_crossattn", "c_concat", "clip_fea", "denoise_mask"})
    float32 = frozenset({"patch_embedding"})
    needs_text = False
    table = Table(
        *_attention("self_attn", "attn1"),
        *_attention("cross_attn", "attn2"),
        move(f"{B}.cross_attn.k_img.@", f"{B}.attn2.add_k_proj.@"),
        move(f"{B}.cross_attn.v_img.@", f"{B}.attn2.add_v_proj.@"),
        move(f"{B}.cross_attn.norm_k_img.weight", f"{B}.attn2.norm_added_k.weight"),
        move(f"{B}.norm3.@", f"{B}.norm2.@"),  # the two count their norms differently
        move(f"{B}.ffn.0.@", f"{B}.ffn.net.0.proj.@"),
        move(f"{B}.ffn.2.@", f"{B}.ffn.net.2.@"),
        move(f"{B}.modulation", f"{B}.scale_shift_table"),
        move("patch_embedding.@", "patch_embedding.@"),
        move("text_embedding.0.@", f"{EMBED}.text_embedder.linear_1.@"),
        move("text_embedding.2.@", f"{EMBED}.text_embedder.linear_2.@"),
        move("time_embedding.0.@", f"{EMBED}.time_embedder.linear_1.@"),
        move("time_embedding.2.@", f"{EMBED}.time_embedder.linear_2.@"),
        move("time_projection.1.@", f"{EMBED}.time_proj.@"),
        move("img_emb.proj.0.@", f"{EMBED}.image_embedder.norm1.@"),
        move("img_emb.proj.1.@", f"{EMBED}.image_embedder.ff.net.0.proj.@"),
        move("img_emb.proj.3.@", f"{EMBED}.image_embedder.ff.net.2.@"),
        move("img_emb.proj.4.@", f"{EMBED}.image_embedder.norm2.@"),
        move("img_emb.emb_pos", f"{EMBED}.image_embedder.pos_embed"),
        move("head.modulation", "scale_shift_table"),
        move("head.head.@", "proj_out.@"),
    )

    @staticmethod
    def matches(shapes: Shapes) -> bool:
        return "head.modulation" in shapes and not any(name in shapes for name in VARIANTS)

    def __init__(self, shapes: Shapes, hints: Mapping[str, Any]) -> None:
        dim, channels = shapes["patch_embedding.weight"][:2]
        patch = shapes["patch_embedding.weight"][2:]
        self.layers = count(shapes, "blocks")
        self.heads = int(hints.get("num_heads") or dim // 128)
        self._frequencies = shapes["time_embedding.0.weight"][1]
        self._sees_images = "img_emb.proj.0.weight" in shapes
        self._image_positions = shapes.get("img_emb.emb_pos", (1, 0))[1]  # of a first and a last CLIP image
        self._sees = ImageAndText()
        volume = patch[0] * patch[1] * patch[2]
        self._config = {
            "patch_size": tuple(patch),
            "num_attention_heads": self.heads,
            "attention_head_dim": dim // self.heads,
            "in_channels": channels,
            "out_channels": shapes["head.head.weight"][0] // volume,
            "text_dim": shapes["text_embedding.0.weight"][1],
            "freq_dim": self._frequencies,
            "ffn_dim": shapes["blocks.0.ffn.0.weight"][0],
            "num_layers": self.layers,
            "cross_attn_norm": "blocks.0.norm3.weight" in shapes,
            "eps": float(hints.get("eps") or 1e-6),
            "image_dim": shapes["img_emb.proj.0.weight"][0] if self._sees_images else None,
            "added_kv_proj_dim": dim if self._sees_images else None,
            "pos_embed_seq_len": self._image_positions or None,
        }

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def prepare(self, transformer: nn.Module) -> None:
        super().prepare(transformer)
        embedder: Any = transformer.condition_embedder
        embedder.timesteps_proj = PowerSinusoid(self._frequencies)
        compute_in_float32(transformer.patch_embedding)  # type: ignore[arg-type]
        if self._sees_images:
            for block in transformer.blocks:  # type: ignore[union-attr]
                block.attn2.processor = self._sees  # type: ignore[union-attr]

    def tokens(self, latent_shape: tuple[int, ...], text_tokens: int) -> dict[str, int]:
        return {"image": tokens_in(latent_shape, self.patch), "text": text_tokens}

    def check(self, latent_shape: tuple[int, ...], cond: Mapping[str, Any]) -> None:
        image, most = cond.get("clip_fea"), self._image_positions
        if image is not None and most and image.shape[1] > most:
            raise ValueError(f"this Wan model sees {most} tokens of CLIP images at most, got {image.shape[1]}; "
                             "give it fewer images")  # fmt: skip

    def call(self, transformer: nn.Module, x: Tensor, timestep: Tensor, cond: Mapping[str, Any]) -> Tensor:
        batch, _, _, height, width = x.shape
        padded = pad_to_patch(x, self.patch)
        text, image = self._context(cond["c_crossattn"], cond.get("clip_fea"), batch)
        out = transformer(
            hidden_states=padded,
            timestep=self._timestep(rows(timestep, batch), padded),
            encoder_hidden_states=text,
            encoder_hidden_states_image=image,
            return_dict=False,
        )[0]
        return out[..., :height, :width]

    def _timestep(self, timestep: Tensor, padded: Tensor) -> Tensor:
        """[B], or one a token [B, T H/2 W/2] where frames differ."""
        if timestep.ndim == 1 or timestep.shape[1] == 1:
            return timestep.flatten()
        return timestep.repeat_interleave(tokens_in(padded.shape, self.patch) // timestep.shape[1], dim=1)

    def _context(self, text: Tensor, image: Tensor | None, batch: int) -> tuple[Tensor, Tensor | None]:
        text = rows(text, batch)
        if not self._sees_images:
            return text, None
        if image is None:  # without an image ComfyUI lets the image keys look at the text
            self._sees.tokens = (text.shape[1], 0)
            return torch.cat([text, text], dim=1), None
        image = rows(image, batch)
        self._sees.tokens = (image.shape[1], 0)
        if not self._image_positions:
            return text, image
        absent = self._image_positions - image.shape[1]  # diffusers adds all of its positions
        self._sees.tokens = (image.shape[1], absent)
        image = nn.functional.pad(image, (0, 0, 0, absent))
        return text, image.reshape(2 * batch, self._image_positions // 2, image.shape[2])


class ImageAndText:
    """WanAttnProcessor's cross-attention of an I2V model, for text of any length: diffusers takes 512 tokens.

    Its keys are `tokens[0]` of the image, `tokens[1]` that nobody sees, then those of the text. They are whole on every
    rank, so it knows no context parallelism.
    """

    tokens = (0, 0)

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Tensor:
        seen, absent = self.tokens
        image, text = encoder_hidden_states[:, :seen], encoder_hidden_states[:, seen + absent :]
        query, of_text, of_image = (
            [x.unflatten(2, (attn.heads, -1)).transpose(1, 2) for x in projected]
            for projected in (
                [attn.norm_q(attn.to_q(hidden_states))],
                [attn.norm_k(attn.to_k(text)), attn.to_v(text)],
                [attn.norm_added_k(attn.add_k_proj(image)), attn.add_v_proj(image)],
            )
        )
        attend = nn.functional.scaled_dot_product_attention
        out = attend(*query, *of_text) + attend(*query, *of_image)
        projection, dropout = attn.to_out
        return dropout(projection(out.transpose(1, 2).flatten(2)))


class PowerSinusoid(nn.Module):
    """Timesteps [N] to [cos, sin] features [N, width], frequencies by pow: exp is 5.5e-5 off at t = 1000."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, timesteps: Tensor) -> Tensor:
        half = self.width // 2
        steps = torch.arange(half, device=timesteps.device, dtype=torch.float32)
        angles = torch.outer(timesteps.float(), torch.pow(10000, -steps / half))
        return torch.cat([angles.cos(), angles.sin()], dim=1)
