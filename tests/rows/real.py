"""VAEs of real size, for fake tensors. Runs in ComfyUI's python, after `import comfy`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
from comfy.ldm.models.autoencoder import AutoencoderKL
from torch import nn

from ..zoo import vaes

WIDE = {**vaes.KL, "ch": 128, "ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "z_channels": 16}
HUNYUAN_15 = {
    **vaes.HUNYUAN, "block_out_channels": [128, 256, 512, 1024, 1024], "num_res_blocks": 2, "ffactor_spatial": 16,
    "ffactor_temporal": 4, "z_channels": 32,
}  # fmt: skip
WAN = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "temperal_downsample": [False, True, True]}


@dataclass(frozen=True, kw_only=True)
class Real:
    make: Callable[[], nn.Module]
    latent: tuple[int, ...]
    ratio: int = 8
    frames: int = 0


REAL = {
    "FLUX 2048x2048": Real(
        make=lambda: vaes.engine("comfy.ldm.modules.diffusionmodules.model", WIDE), latent=(1, 16, 256, 256)
    ),
    "Wan 2.1 720x1280x81": Real(
        make=lambda: comfy.ldm.wan.vae.WanVAE(dim=96, z_dim=16, **WAN), latent=(1, 16, 21, 90, 160), frames=81
    ),
    "Wan 2.2 704x1280x121": Real(
        make=lambda: comfy.ldm.wan.vae2_2.WanVAE(dim=160, z_dim=48, **WAN),
        latent=(1, 48, 31, 44, 80),
        ratio=16,
        frames=121,
    ),
    "HunyuanVideo 720x1280x129": Real(
        make=lambda: AutoencoderKL(ddconfig={**WIDE, "conv3d": True, "time_compress": 4}, embed_dim=16),
        latent=(1, 16, 33, 90, 160),
        frames=129,
    ),
    "HunyuanVideo 1.5 720x1280x121": Real(
        make=lambda: vaes.engine("comfy.ldm.hunyuan_video.vae_refiner", HUNYUAN_15, regularizer=vaes.EMPTY),
        latent=(1, 32, 31, 45, 80),
        ratio=16,
        frames=121,
    ),
    "SeedVR2 720x1280x21": Real(make=vaes.seedvr.VideoAutoencoderKLWrapper, latent=(1, 16, 6, 90, 160), frames=21),
    "LTX 0.9.5 704x1280x121": Real(
        make=lambda: vaes.lightricks.VideoVAE(2), latent=(1, 128, 16, 22, 40), ratio=32, frames=121
    ),
}
