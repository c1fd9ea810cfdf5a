"""A text encoder and a VAE of which only the shapes are real: what large encoders make, from seeded noise."""

from __future__ import annotations

import json
import math
import zlib
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.sd
import torch
from comfy_api.latest import io
from torch import Tensor

from .graph_ends import conditioning

CATEGORY = "cp test"


class TextOfShape:
    """Answers as ComfyUI's CLIP; a text is seeded noise in the shape of `spec`, other noise for each text."""

    def __init__(self, spec: dict[str, Any]) -> None:
        device = comfy.model_management.text_encoder_device()
        self.spec, self.layer_idx, self.use_clip_schedule = spec, None, False
        self.tokenizer_options: dict[str, Any] = {}
        self.cond_stage_model = self.tokenizer = torch.nn.Module()
        self.apply_hooks_to_conds = None
        self.patcher = comfy.model_patcher.ModelPatcher(self.cond_stage_model, device, device)

    def clone(self, *_: Any, **__: Any) -> TextOfShape:
        return self

    def add_patches(self, *_: Any, **__: Any) -> list[str]:
        return []

    def clip_layer(self, layer: int) -> None:
        self.layer_idx = layer  # type: ignore[assignment]

    def set_tokenizer_option(self, name: str, value: Any) -> None:
        self.tokenizer_options[name] = value

    def tokenize(self, *texts: Any, **options: Any) -> dict[str, Any]:
        words = [str(text) for text in (*texts, *sorted(options.items())) if "tensor(" not in str(text)]
        number = zlib.crc32(" ".join(words).encode())
        return {name: [[(number, 1.0)]] for name in ("l", "g", "t5xxl", "llama", "qwen3_06b", "qwen_4b")}

    def encode_from_tokens_scheduled(
        self, tokens: dict[str, Any], unprojected: bool = False, add_dict: Any = None, show_pbar: bool = True
    ) -> list[list[Any]]:
        number = next(iter(tokens.values()))[0][0][0]
        made = conditioning(self.spec, torch.Generator().manual_seed(number))
        return [[text, options | (add_dict or {})] for text, options in made]

    def encode_from_tokens(self, tokens: dict[str, Any], return_pooled: bool = False, return_dict: bool = False) -> Any:
        ((text, options),) = self.encode_from_tokens_scheduled(tokens)
        pooled = options.get("pooled_output")
        if return_dict:
            return {"cond": text, "pooled_output": pooled, **options}
        return (text, pooled) if return_pooled else text


class VaeOfShape(comfy.sd.VAE):
    """A VAE that averages pixels and spreads them over its channels. `pixels` and `frames` are how many go into one
    latent pixel and frame; 0 pixels is a VAE for sound, whose `frames` are then the
    bins of a spectrogram (0: none); 0 frames or 1 is one for pictures."""

    def __init__(self, channels: int, pixels: int, frames: int) -> None:
        super().__init__(sd={"pixel_space_vae": torch.tensor(1.0)})
        self.latent_channels, self.pixels, self.frames = channels, pixels or 2048, frames
        self.sound, self.video = not pixels, frames > 1 and pixels > 0
        self.latent_dim = 1 if self.sound else 3 if self.video else 2
        ratio = (self._latent_frames, self.pixels, self.pixels) if self.video else self.pixels
        self.downscale_ratio = ratio
        self.upscale_ratio = (self._frames, self.pixels, self.pixels) if self.video else self.pixels
        self.downscale_index_formula = self.upscale_index_formula = (frames, pixels, pixels) if self.video else None
        self.mix = torch.randn(channels, 3, generator=torch.Generator().manual_seed(channels)) / math.sqrt(3)

    def encode(self, pixel_samples: Tensor, *_: Any, **__: Any) -> Tensor:
        if self.sound:
            wave = pixel_samples.movedim(-1, 1).mean(1, keepdim=True).repeat(1, 3, 1)
            pooled = torch.nn.functional.adaptive_avg_pool1d(wave, max(1, wave.shape[-1] // self.pixels))
            latent = torch.einsum("oc,bct->bot", self.mix, pooled)
            return latent[..., None].repeat(1, 1, 1, self.frames) if self.frames else latent
        pictures = pixel_samples[..., :3].float() * 2 - 1
        pictures = pictures[None] if self.video and pictures.ndim == 4 else pictures
        channels_first = pictures.movedim(-1, 1)
        height, width = (side // self.pixels for side in pictures.shape[-3:-1])
        if self.video:
            sizes = (self._latent_frames(pictures.shape[1]), height, width)
            pooled = torch.nn.functional.adaptive_avg_pool3d(channels_first, sizes)
            return torch.einsum("oc,bcthw->bothw", self.mix, pooled)
        pooled = torch.nn.functional.adaptive_avg_pool2d(channels_first, (height, width))
        return torch.einsum("oc,bchw->bohw", self.mix, pooled)

    encode_tiled = encode

    def decode(self, samples_in: Tensor, *_: Any, **__: Any) -> Tensor:
        if samples_in.is_nested:
            samples_in = samples_in.unbind()[0]
        if self.sound:
            samples_in = samples_in.mean(-1) if self.frames else samples_in
            return samples_in.mean(1).repeat_interleave(self.pixels, -1)[..., None].repeat(1, 1, 2).clamp(-1, 1)
        pixels = torch.einsum("oc,bo...->bc...", self.mix, samples_in.float()).sigmoid()
        for axis in (-1, -2):
            pixels = pixels.repeat_interleave(self.pixels, axis)
        if self.video:
            pixels = pixels.repeat_interleave(self.frames, 2)[:, :, : self._frames(samples_in.shape[2])]
        return pixels.movedim(1, -1)

    decode_tiled = decode

    def _latent_frames(self, frames: int) -> int:
        return (frames - 1) // self.frames + 1

    def _frames(self, latent_frames: int) -> int:
        return (latent_frames - 1) * self.frames + 1

    def spacial_compression_encode(self) -> int:
        return self.pixels

    spacial_compression_decode = spacial_compression_encode

    def temporal_compression_decode(self) -> int | None:
        return self.frames if self.video else None


class ShapedText(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.String.Input("spec")]
        return io.Schema(
            node_id="CPTestText", category=CATEGORY, is_dev_only=True, inputs=inputs, outputs=[io.Clip.Output()]
        )

    @classmethod
    def execute(cls, spec: str) -> io.NodeOutput:
        return io.NodeOutput(TextOfShape(json.loads(spec)))


class ShapedVae(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Int.Input("channels"), io.Int.Input("pixels", min=0), io.Int.Input("frames", min=0)]
        return io.Schema(
            node_id="CPTestVae", category=CATEGORY, is_dev_only=True, inputs=inputs, outputs=[io.Vae.Output()]
        )

    @classmethod
    def execute(cls, channels: int, pixels: int, frames: int) -> io.NodeOutput:
        return io.NodeOutput(VaeOfShape(channels, pixels, frames))


NODES = [ShapedText, ShapedVae]
