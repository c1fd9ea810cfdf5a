"""Tiny random versions of ComfyUI's own VAE classes, and files of some. In ComfyUI's python, after `import comfy`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.latent_formats
import comfy.ldm.cogvideo.vae
import comfy.ldm.cosmos.vae
import comfy.ldm.genmo.vae.model as genmo
import comfy.ldm.lightricks.vae.causal_video_autoencoder as lightricks
import comfy.ldm.minimax.audio_vae
import comfy.ldm.minimax.vae as minimax
import comfy.ldm.modules.attention
import comfy.ldm.seedvr.vae as seedvr
import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import comfy.taesd.taehv
import comfy.taesd.taesd
import torch
from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine
from safetensors.torch import save_file
from torch import nn

from .files import save_tiny_vae, weights_of

# As on a GPU: ComfyUI's choice for the CPU goes by other code than F.scaled_dot_product_attention.
genmo.optimized_attention = comfy.ldm.modules.attention.attention_pytorch


@dataclass(frozen=True, kw_only=True)
class Case:
    """`latent` is an odd size of it, `ratio` pixels a latent row, `frames` of pixels for an encoder (0: no video)."""

    make: Callable[[], nn.Module]
    latent: tuple[int, ...]
    ratio: int = 8
    frames: int = 0


KL: dict[str, Any] = {
    "double_z": True, "z_channels": 8, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 32,
    "ch_mult": [1, 2, 2, 2], "num_res_blocks": 1, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip
GAUSSIAN = "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"
EMPTY = "comfy.ldm.models.autoencoder.EmptyRegularizer"
HUNYUAN: dict[str, Any] = {
    "in_channels": 3, "out_channels": 3, "num_res_blocks": 1, "downsample_match_channel": True,
    "upsample_match_channel": True,
}  # fmt: skip
COSMOS: dict[str, Any] = {
    "z_channels": 16, "latent_channels": 16, "z_factor": 1, "resolution": 1024, "in_channels": 3, "out_channels": 3,
    "channels": 16, "channels_mult": [2, 4, 4], "num_res_blocks": 1, "attn_resolutions": [32], "dropout": 0.0,
    "patch_size": 4, "num_groups": 1, "temporal_compression": 8, "spacial_compression": 8,
}  # fmt: skip
KEPT = (
    "inv_freq",
    "pixel_",
    "wavelets",
    "_arange",
    "timestep_scale",
    "latent_std",
    "latent_mean",
)  # what constructors compute


def engine(
    encoder: str, params: dict[str, Any], *, regularizer: str = GAUSSIAN, decoder: str = "", more: Any = None
) -> nn.Module:
    return AutoencodingEngine(
        regularizer_config={"target": regularizer},
        encoder_config={"target": f"{encoder}.Encoder", "params": params},
        decoder_config={"target": decoder or f"{encoder}.Decoder", "params": {**params, **(more or {})}},
    )


def ltx(version: int, **changes: Any) -> nn.Module:
    config = lightricks.VideoVAE.get_default_config(None, version)
    for key in config.keys() & {"blocks", "encoder_blocks", "decoder_blocks"}:
        config[key] = [[name, _one_layer(name, params)] for name, params in config[key]]
    narrow = {"encoder_base_channels": 16, "decoder_base_channels": 16}
    return lightricks.VideoVAE(version, {**config, **narrow, **changes})


def mochi() -> nn.Module:
    model = genmo.VideoVAE.__new__(genmo.VideoVAE)
    nn.Module.__init__(model)
    common: dict[str, Any] = {
        "channel_multipliers": [1, 2, 3, 4], "num_res_blocks": [1] * 5, "latent_dim": 12, "padding_mode": "replicate",
    }  # fmt: skip
    model.encoder = genmo.Encoder(
        in_channels=15, base_channels=32, temporal_reductions=[1, 2, 3], spatial_reductions=[2, 2, 2],
        prune_bottlenecks=[False] * 5, has_attentions=[False, True, True, True, True], input_is_conv_1x1=True, **common,
    )  # fmt: skip
    model.decoder = genmo.Decoder(
        out_channels=3, base_channels=32, temporal_expansions=[1, 2, 3], spatial_expansions=[2, 2, 2],
        has_attention=[False] * 5, output_norm=False, nonlinearity="silu", output_nonlinearity="silu", causal=True,
        **common,
    )  # fmt: skip
    return model


def minimax_h3() -> nn.Module:
    """With tiles of 64 pixels: an odd latent has several. tests/site makes ComfyUI's loader build it as small."""
    model = minimax.MiniMaxH3VideoVAE(
        ch=32, ch_mult=(1, 1, 1, 1, 1, 1), num_res_blocks=1, tile_size=64, tile_overlap_min=16
    )
    model.decoder = minimax.ViT3DDecoder(num_layers=2, heads=2, dim_head=32)
    return model


def seedvr2(*gib: float) -> nn.Module:
    """`gib`: the limits of memory for a convolution and a norm, as ComfyUI has them in one process."""
    wide, seedvr.BYTEDANCE_BLOCK_OUT_CHANNELS = seedvr.BYTEDANCE_BLOCK_OUT_CHANNELS, (32, 32, 64, 64)
    try:
        model = seedvr.VideoAutoencoderKLWrapper()
    finally:
        seedvr.BYTEDANCE_BLOCK_OUT_CHANNELS = wide
    if gib:
        model.set_memory_limit(*gib)
    return model


def random_weights(model: nn.Module, seed: int = 0) -> nn.Module:
    """Values with which activations neither grow nor die, other ones for every weight."""
    dice = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        noise = torch.randn(tensor.shape, generator=dice)
        if tensor.is_floating_point() and not any(kept in name for kept in KEPT):
            tensor.data = _value(name, noise).to(tensor.dtype)
    return model.eval().requires_grad_(False)


def _one_layer(name: str, params: Any) -> Any:
    if isinstance(params, dict):
        return {**params, "num_layers": 1} if "num_layers" in params else params
    return 1 if name == "res_x" else params


def _value(name: str, noise: torch.Tensor) -> torch.Tensor:
    if "running_var" in name or name.endswith("std-of-means"):
        return 1 + 0.2 * noise.abs()
    if noise.ndim > 1 and not any(part in name for part in ("gamma", "scale_shift", "per_channel")):
        return noise / max(noise[0].numel(), 1) ** 0.5
    if name.endswith(("bias", "mean")) or "scale_shift" in name or "mean-of" in name:
        return 0.1 * noise
    return 0.3 * noise if "per_channel" in name else 1 + 0.1 * noise


CASES: dict[str, Case] = {
    "SD AutoencoderKL": Case(make=lambda: AutoencoderKL(ddconfig=KL, embed_dim=8), latent=(2, 8, 11, 7)),
    "FLUX, SD3": Case(make=lambda: engine("comfy.ldm.modules.diffusionmodules.model", KL), latent=(1, 8, 11, 7)),
    "FLUX.2": Case(
        make=lambda: AutoencoderKL(ddconfig={**KL, "batch_norm_latent": True}, embed_dim=8),
        latent=(1, 32, 11, 7),
        ratio=16,
    ),
    "HunyuanImage 2.1": Case(
        make=lambda: engine(
            "comfy.ldm.hunyuan_video.vae",
            {**HUNYUAN, "block_out_channels": [32, 32, 64, 64, 64, 64], "ffactor_spatial": 32, "z_channels": 32},
        ),
        latent=(1, 32, 5, 4),
        ratio=32,
    ),
    "HunyuanImage refiner": Case(
        make=lambda: engine(
            "comfy.ldm.hunyuan_video.vae_refiner",
            {
                **HUNYUAN,
                "block_out_channels": [32, 32, 64, 64, 64],
                "ffactor_spatial": 16,
                "ffactor_temporal": 4,
                "z_channels": 8,
                "refiner_vae": False,
            },
        ),
        latent=(1, 8, 1, 5, 4),
        ratio=16,
    ),
    "Wan 2.1, Qwen-Image": Case(
        make=lambda: comfy.ldm.wan.vae.WanVAE(
            dim=16, z_dim=16, dim_mult=[1, 2, 4, 4], num_res_blocks=2, temperal_downsample=[False, True, True]
        ),
        latent=(1, 16, 3, 11, 7),
        frames=9,
    ),
    "Wan 2.2": Case(
        make=lambda: comfy.ldm.wan.vae2_2.WanVAE(
            dim=16,
            dec_dim=16,
            z_dim=48,
            dim_mult=[1, 2, 4, 4],
            num_res_blocks=2,
            temperal_downsample=[False, True, True],
        ),
        latent=(1, 48, 3, 11, 7),
        ratio=16,
        frames=9,
    ),
    "HunyuanVideo": Case(
        make=lambda: AutoencoderKL(ddconfig={**KL, "conv3d": True, "time_compress": 4}, embed_dim=8),
        latent=(1, 8, 4, 7, 5),
        frames=13,
    ),
    "HunyuanVideo 1.5": Case(
        make=lambda: engine(
            "comfy.ldm.hunyuan_video.vae_refiner",
            {
                **HUNYUAN,
                "block_out_channels": [16, 16, 32, 32, 32],
                "ffactor_spatial": 16,
                "ffactor_temporal": 4,
                "z_channels": 8,
            },
            regularizer=EMPTY,
        ),
        latent=(1, 8, 4, 5, 4),
        ratio=16,
        frames=13,
    ),
    "LTX 0.9": Case(make=lambda: ltx(0), latent=(1, 128, 3, 5, 4), ratio=32, frames=17),
    "LTX 0.9, reflecting": Case(
        make=lambda: ltx(0, spatial_padding_mode="reflect"), latent=(1, 128, 3, 8, 4), ratio=32, frames=17
    ),
    "LTX 0.9.1, noise": Case(make=lambda: ltx(1), latent=(1, 128, 3, 5, 4), ratio=32, frames=17),
    "LTX 0.9.5, timestep": Case(make=lambda: ltx(2), latent=(1, 128, 3, 5, 4), ratio=32, frames=17),
    "Cosmos 1": Case(
        make=lambda: comfy.ldm.cosmos.vae.CausalContinuousVideoTokenizer(**COSMOS), latent=(1, 16, 2, 11, 7), frames=9
    ),
    "Mochi": Case(make=mochi, latent=(1, 12, 3, 7, 5), frames=13),
    "CogVideoX": Case(
        make=lambda: comfy.ldm.cogvideo.vae.AutoencoderKLCogVideoX(
            block_out_channels=(32, 32, 64, 64), latent_channels=16, layers_per_block=1
        ),
        latent=(1, 16, 3, 11, 7),
        frames=9,
    ),
    "SVD": Case(
        make=lambda: engine(
            "comfy.ldm.modules.diffusionmodules.model",
            KL,
            decoder="comfy.ldm.modules.temporal_ae.VideoDecoder",
            more={"video_kernel_size": [3, 1, 1], "alpha": 0.0},
        ),
        latent=(4, 8, 11, 7),
    ),
    "SeedVR2": Case(make=seedvr2, latent=(1, 16, 4, 7, 5), frames=13),
    "SeedVR2, slicing": Case(make=lambda: seedvr2(5e-4, 5e-5), latent=(1, 16, 2, 7, 5), frames=5),
    "MiniMax H3": Case(make=minimax_h3, latent=(1, 24, 7, 7, 5), ratio=16, frames=23),
    "TAESD": Case(make=lambda: comfy.taesd.taesd.TAESD(latent_channels=16), latent=(1, 16, 11, 7)),
    "TAESD of FLUX.2": Case(
        make=lambda: comfy.taesd.taesd.TAESD(latent_channels=128), latent=(1, 128, 11, 7), ratio=16
    ),
    "TAEHV": Case(make=lambda: comfy.taesd.taehv.TAEHV(latent_channels=16), latent=(1, 16, 3, 11, 7), frames=12),
    "TAEHV of Wan 2.2": Case(
        make=lambda: comfy.taesd.taehv.TAEHV(latent_channels=48), latent=(1, 48, 3, 7, 5), ratio=16, frames=12
    ),
    "TAEHV of HunyuanVideo 1.5": Case(
        make=lambda: comfy.taesd.taehv.TAEHV(latent_channels=32, latent_format=comfy.latent_formats.HunyuanVideo15),
        latent=(1, 32, 3, 7, 5),
        ratio=16,
        frames=12,
    ),
    "TAEHV of LTX-2": Case(
        make=lambda: comfy.taesd.taehv.TAEHV(latent_channels=128), latent=(1, 128, 2, 5, 4), ratio=32, frames=16
    ),
}


def write(models: Path) -> None:
    folder = models / "vae"
    folder.mkdir(exist_ok=True)
    for seed, name in enumerate(("wan", "other_wan")):
        save_file(weights_of(random_weights(CASES["Wan 2.1, Qwen-Image"].make(), seed)), folder / f"{name}.safetensors")
    save_file(weights_of(random_weights(_flux())), folder / "flux.safetensors")
    for version in (0, 1):
        model = random_weights(ltx(version))
        config = {"config": json.dumps({"vae": model.config})}
        save_file(weights_of(model), folder / f"ltx{version}.safetensors", metadata=config)
    save_file(weights_of(random_weights(minimax_h3())), folder / "minimax_h3.safetensors")
    audio = comfy.ldm.minimax.audio_vae.MiniMaxH3AudioVAE(encoder_dim=8, latent_dim=64, decoder_dim=128)
    save_file(weights_of(random_weights(audio)), folder / "minimax_h3_audio.safetensors")
    save_tiny_vae(random_weights(CASES["TAESD"].make()), models / "vae_approx", "taef1")


def _flux() -> nn.Module:
    """ComfyUI fixes the encoder's width, and goes by the file for the decoder's."""
    narrow = {**KL, "z_channels": 16, "num_res_blocks": 2, "ch_mult": [1, 2, 4, 4]}
    return AutoencodingEngine(
        regularizer_config={"target": GAUSSIAN},
        encoder_config={"target": "comfy.ldm.modules.diffusionmodules.model.Encoder", "params": {**narrow, "ch": 128}},
        decoder_config={"target": "comfy.ldm.modules.diffusionmodules.model.Decoder", "params": narrow},
    )
