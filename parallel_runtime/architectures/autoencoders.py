"""ComfyUI's VAEs that workers may divide: classes that were compared with themselves in one process, and how closely.

A VAE is known by its classes, never by a file's name. Knows only names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ENGINE = "comfy.ldm.models.autoencoder.AutoencodingEngine"
KL = "comfy.ldm.models.autoencoder.AutoencoderKL"
DIFFUSION = "comfy.ldm.modules.diffusionmodules.model"
HUNYUAN = "comfy.ldm.hunyuan_video"
LTX = "comfy.ldm.lightricks.vae.causal_video_autoencoder"
COSMOS = "comfy.ldm.cosmos.cosmos_tokenizer.layers3d"
COGVIDEO = "comfy.ldm.cogvideo.vae"
GENMO = "comfy.ldm.genmo.vae.model"
SEEDVR = "comfy.ldm.seedvr.vae"


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The largest relative L2 distance from one process in float32 that was measured, on 2 to 4 CPU ranks with tiny
    random weights: rows and columns, odd and uneven sizes. tests/rows does it again.

    Modules of the classes `over_time` attend along time only. `chunk_size` is the function, "module:name", by which
    the VAE asks how many bytes of time it may compute at once; `limits` its method that takes the limits of memory
    by which it would slice its convolutions and norms: no rank may go by its own bytes.
    """

    decode: float
    encode: float
    over_time: tuple[str, ...] = ()
    chunk_size: str = ""
    limits: str = ""


COMPARED: dict[str, Compared] = {
    f"{KL}({DIFFUSION}.Encoder, {DIFFUSION}.Decoder)": Compared(decode=1.4e-6, encode=1.1e-6),
    f"{ENGINE}({DIFFUSION}.Encoder, {DIFFUSION}.Decoder)": Compared(decode=1.1e-6, encode=1.1e-6),
    f"{ENGINE}({DIFFUSION}.Encoder, comfy.ldm.modules.temporal_ae.VideoDecoder)": Compared(
        decode=9.1e-7, encode=7.6e-7
    ),
    f"{ENGINE}({HUNYUAN}.vae.Encoder, {HUNYUAN}.vae.Decoder)": Compared(decode=9.5e-7, encode=8.3e-7),
    f"{ENGINE}({HUNYUAN}.vae_refiner.Encoder, {HUNYUAN}.vae_refiner.Decoder)": Compared(decode=8.4e-7, encode=7.0e-7),
    "comfy.ldm.wan.vae.WanVAE(comfy.ldm.wan.vae.Encoder3d, comfy.ldm.wan.vae.Decoder3d)": Compared(
        decode=2.1e-6, encode=1.8e-6
    ),
    "comfy.ldm.wan.vae2_2.WanVAE(comfy.ldm.wan.vae2_2.Encoder3d, comfy.ldm.wan.vae2_2.Decoder3d)": Compared(
        decode=8.7e-7, encode=6.2e-7
    ),
    f"{LTX}.VideoVAE({LTX}.Encoder, {LTX}.Decoder)": Compared(
        decode=1.1e-6, encode=1.4e-6, chunk_size=f"{LTX}:get_max_chunk_size"
    ),
    f"{GENMO}.VideoVAE({GENMO}.Encoder, {GENMO}.Decoder)": Compared(
        decode=7.3e-7, encode=1.2e-6, over_time=(f"{GENMO}.Attention",)
    ),
    "comfy.ldm.cosmos.vae.CausalContinuousVideoTokenizer"
    f"({COSMOS}.EncoderFactorized, {COSMOS}.DecoderFactorized)": Compared(decode=7.5e-7, encode=1.1e-6),
    f"{COGVIDEO}.AutoencoderKLCogVideoX({COGVIDEO}.Encoder3D, {COGVIDEO}.Decoder3D)": Compared(
        decode=5.2e-7, encode=9.3e-7
    ),
    f"{SEEDVR}.VideoAutoencoderKLWrapper({SEEDVR}.Encoder3D, {SEEDVR}.Decoder3D)": Compared(
        decode=1.2e-6, encode=1.4e-6, limits="set_memory_limit"
    ),
    "comfy.taesd.taesd.TAESD": Compared(decode=8.4e-7, encode=4.2e-7),
    "comfy.taesd.taehv.TAEHV": Compared(decode=8.2e-7, encode=1.1e-6),
}


def name_of(thing: Any) -> str:
    """`module.Class` of an object."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def kind_of(model: Any) -> str:
    """The classes of a VAE: its own and those of its encoder and decoder, where these are classes of ComfyUI's."""
    parts = [name_of(getattr(model, part)) for part in ("encoder", "decoder") if hasattr(model, part)]
    parts = [part for part in parts if not part.startswith("torch.")]
    return f"{name_of(model)}({', '.join(parts)})" if parts else name_of(model)
