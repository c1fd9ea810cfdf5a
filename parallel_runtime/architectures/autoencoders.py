"""ComfyUI's VAEs that workers may divide: classes that were compared with themselves in one process.

Their relative L2 distance in float32 was 2.1e-6 or less, on 2 to 4 CPU ranks with tiny random weights: rows and
columns, odd and uneven sizes; tests/rows compares them. MiniMax H3's was the same to the bit: ranks compute whole tiles
of it. A VAE is known by its classes, never by a file's name. Knows only names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..specs import VAEMethod

ENGINE = "comfy.ldm.models.autoencoder.AutoencodingEngine"
KL = "comfy.ldm.models.autoencoder.AutoencoderKL"
DIFFUSION = "comfy.ldm.modules.diffusionmodules.model"
HUNYUAN = "comfy.ldm.hunyuan_video"
LTX = "comfy.ldm.lightricks.vae.causal_video_autoencoder"
COSMOS = "comfy.ldm.cosmos.cosmos_tokenizer.layers3d"
COGVIDEO = "comfy.ldm.cogvideo.vae"
GENMO = "comfy.ldm.genmo.vae.model"
SEEDVR = "comfy.ldm.seedvr.vae"
MINIMAX = "comfy.ldm.minimax.vae"
MINIMAX_H3 = f"{MINIMAX}.MiniMaxH3VideoVAE({MINIMAX}.EncoderFCN3D, {MINIMAX}.ViT3DDecoder)"

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TileGrid:
    """So many tiles of `tile` frames, rows and columns of the input, in the order of clips, which make `frames`."""

    count: int
    tile: Shape
    frames: int


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """A VAE that decodes and encodes a tile of a clip by methods of these names, [B, C, T, H, W] -> [B, C, T, H, W].

    `output(model, method, shape)` is the shape of what they make of a tile, `grid` what a whole input is cut into.
    An encoder takes `least_rows` rows and columns of the latent or more."""

    decode: str
    encode: str
    output: Callable[[Any, VAEMethod, Shape], Shape]
    grid: Callable[[Any, VAEMethod, Shape], TileGrid]
    least_rows: int


def _minimax_h3_output(model: Any, method: VAEMethod, shape: Shape) -> Shape:
    batch, _, frames, rows, columns = shape
    space, time = model.vae_ratio, model.vae_ratio_t
    if method == "decode":
        return batch, model.decoder.out_channels, frames * time, rows * space, columns * space
    return batch, model.quant_conv.out_channels, -(-frames // time), rows // space, columns // space


def _minimax_h3_grid(model: Any, method: VAEMethod, shape: Shape) -> TileGrid:
    frames, *sides = shape[2:]
    unit = model.vae_ratio if method == "decode" else 1
    cuts = [model.split_tiles(side * unit)[1] if model.tiling else [side * unit] for side in sides]
    if frames == 1:
        clips, clip, made = 1, 1, 1
    elif method == "decode":
        clips, clip = model._decode_temporal_chunks(frames)[1], model.tokens_chunk_size + model.token_overlap
        made = model.decode_output_shape(shape)[2]
    else:
        clips, clip = -(-frames // model.clip_length), model.clip_length
        made = clips * model.tokens_chunk_size - model.token_drop
    count = clips * len(cuts[0]) * len(cuts[1])
    return TileGrid(count=count, tile=(clip, *(lengths[0] // unit for lengths in cuts)), frames=made)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What a VAE needs beside its rows. Modules of the classes `over_time` attend along time only. `chunk_size` is the
    function, "module:name", by which the VAE asks how many bytes of time it may compute at once; `limits` its method
    that takes the limits of memory by which it would slice its convolutions and norms: no rank may go by its own bytes.
    With `tiles` each rank computes tiles of the picture instead of rows."""

    over_time: tuple[str, ...] = ()
    chunk_size: str = ""
    limits: str = ""
    tiles: Tiles | None = None


MINIMAX_H3_TILES = Tiles(
    decode="_decode_pixels", encode="_encode_moments", output=_minimax_h3_output, grid=_minimax_h3_grid, least_rows=2
)
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
    MINIMAX_H3: Compared(tiles=MINIMAX_H3_TILES),
    "comfy.taesd.taesd.TAESD": Compared(),
    "comfy.taesd.taehv.TAEHV": Compared(),
}

_LDM = "comfy.ldm."
WHOLE: dict[str, str] = {  # ComfyUI's other classes, and the sentence (cpReport) that says why its own process has them
    f"{_LDM}audio.autoencoder.AudioOobleckVAE": "vae.sound",
    f"{_LDM}audio.vae_sa3.SA3AudioVAE": "vae.sound",
    f"{_LDM}ace.vae.music_dcae_pipeline.MusicDCAE": "vae.sound",
    f"{_LDM}lightricks.vae.audio_vae.AudioVAE": "vae.sound",
    f"{_LDM}minimax.audio_vae.MiniMaxH3AudioVAE": "vae.sound",
    f"{_LDM}minimax_music.dav.MiniMaxMusic3DAV": "vae.sound",
    f"{_LDM}mmaudio.vae.autoencoder.AudioAutoencoder": "vae.sound",
    f"{_LDM}hunyuan3d.vae.ShapeVAE": "vae.shape",
    f"{_LDM}trellis2.vae.ShapeVae": "vae.shape",
    f"{_LDM}trellis2.vae.TextureVae": "vae.shape",
    f"{_LDM}triposplat.vae.OctreeGaussianDecoder": "vae.shape",
    f"{_LDM}cascade.stage_a.StageA": "vae.small",
    f"{_LDM}cascade.stage_c_coder.StageC_coder": "vae.small",
    f"{_LDM}lightricks.vae.na_diffusion_decoder.CausalDiffusionVAE": "vae.windows",
    f"{_LDM}mage_flow.vae.MageVAE": "vae.windows",
    "comfy.pixel_space_convert.PixelspaceConversionVAE": "vae.pixels",
}


def name_of(thing: Any) -> str:
    """`module.Class` of an object."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"


def kind_of(model: Any) -> str:
    """The classes of a VAE: its own and those of its encoder and decoder, where these are classes of ComfyUI's."""
    parts = [name_of(getattr(model, part)) for part in ("encoder", "decoder") if hasattr(model, part)]
    parts = [part for part in parts if not part.startswith("torch.")]
    return f"{name_of(model)}({', '.join(parts)})" if parts else name_of(model)
