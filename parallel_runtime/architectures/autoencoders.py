"""ComfyUI's VAEs that workers may divide: classes that were compared with themselves in one process.

Their relative L2 distance in float32 was 2.1e-6 or less, on 2 to 4 CPU ranks with tiny random weights: rows and
columns, odd and uneven sizes; tests/rows compares them. A VAE is known by its classes, never by a file's name. Knows
only names.
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
    """What a VAE needs beside its rows. Modules of the classes `over_time` attend along time only. `chunk_size` is the
    function, "module:name", by which the VAE asks how many bytes of time it may compute at once; `limits` its method
    that takes the limits of memory by which it would slice its convolutions and norms: no rank may go by its own bytes.
    """

    over_time: tuple[str, ...] = ()
    chunk_size: str = ""
    limits: str = ""


COMPARED: dict[str, Compared] = {
    f"{KL}({DIFFUSION}.Encoder, {DIFFUSION}.Decoder)": Compared(),
    f"{ENGINE}({DIFFUSION}.Encoder, {DIFFUSION}.Decoder)": Compared(),
    f"{ENGINE}({DIFFUSION}.Encoder, comfy.ldm.modules.temporal_ae.VideoDecoder)": Compared(),
    f"{ENGINE}({HUNYUAN}.vae.Encoder, {HUNYUAN}.vae.Decoder)": Compared(),
    f"{ENGINE}({HUNYUAN}.vae_refiner.Encoder, {HUNYUAN}.vae_refiner.Decoder)": Compared(),
    "comfy.ldm.wan.vae.WanVAE(comfy.ldm.wan.vae.Encoder3d, comfy.ldm.wan.vae.Decoder3d)": Compared(),
    "comfy.ldm.wan.vae2_2.WanVAE(comfy.ldm.wan.vae2_2.Encoder3d, comfy.ldm.wan.vae2_2.Decoder3d)": Compared(),
    f"{LTX}.VideoVAE({LTX}.Encoder, {LTX}.Decoder)": Compared(chunk_size=f"{LTX}:get_max_chunk_size"),
    f"{GENMO}.VideoVAE({GENMO}.Encoder, {GENMO}.Decoder)": Compared(over_time=(f"{GENMO}.Attention",)),
    "comfy.ldm.cosmos.vae.CausalContinuousVideoTokenizer"
    f"({COSMOS}.EncoderFactorized, {COSMOS}.DecoderFactorized)": Compared(),
    f"{COGVIDEO}.AutoencoderKLCogVideoX({COGVIDEO}.Encoder3D, {COGVIDEO}.Decoder3D)": Compared(),
    f"{SEEDVR}.VideoAutoencoderKLWrapper({SEEDVR}.Encoder3D, {SEEDVR}.Decoder3D)": Compared(limits="set_memory_limit"),
    "comfy.taesd.taesd.TAESD": Compared(),
    "comfy.taesd.taehv.TAEHV": Compared(),
}


def name_of(thing: Any) -> str:
    """`module.Class` of an object."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def kind_of(model: Any) -> str:
    """The classes of a VAE: its own and those of its encoder and decoder, where these are classes of ComfyUI's."""
    parts = [name_of(getattr(model, part)) for part in ("encoder", "decoder") if hasattr(model, part)]
    parts = [part for part in parts if not part.startswith("torch.")]
    return f"{name_of(model)}({', '.join(parts)})" if parts else name_of(model)
