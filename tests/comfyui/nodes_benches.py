"""The networks that nodes are tried on, each with its tiny encoders, VAE and files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import save_file

from ..zoo.unets import GLIGEN_TEXT, POOLED, TEXT, UNET_FILES
from .conditioning import SAMPLED, WITHOUT_PLAN, text_of_unet
from .graphs import TEXTS, Parallel
from .nodes_graphs import HEIGHT, WIDTH, Bench, node
from .server import Server

CUT = Parallel(ring_degree=2, ulysses_degree=1, devices="cpu,cpu")
LATENT = f"{HEIGHT // 8},{WIDTH // 8}"
SEEN = 64  # numbers a token of what CLIP vision saw


def seen(width: int = SEEN, projected: int = TEXT, size: int = 28) -> dict[str, dict[str, Any]]:
    vision = node("CPTestClipVision", width=width, projected=projected, size=size)
    encoded = node("CLIPVisionEncode", clip_vision=["CLIP_VISION", 0], image=["IMAGE", 0], crop="center")
    return {"CLIP_VISION": vision, "CLIP_VISION_OUTPUT": encoded}


def clip(kind: str, width: int, pooled: int) -> dict[str, Any]:
    return node("CPTestClip", kind=kind, width=width, pooled=pooled)


def vae(name: str) -> dict[str, Any]:
    return node("VAELoader", vae_name=name)


def lora(key: str, width: int) -> dict[str, Any]:
    return node("CPTestTrainedLora", key=key, width=width)


def _unet(name: str) -> Bench:
    file = f"unets/{name}.safetensors"
    projected = 768 if name in ("unet_unclip", "unet_zero123") else TEXT
    return Bench(
        name=name,
        loader=node("UNETLoader", unet_name=file, weight_dtype="default"),
        text=text_of_unet(name),
        latent=f"2,4,{LATENT}",
        parallel=CUT,
        gives={
            "CLIP": clip(*CLIPS.get(name, ("sdxl", TEXT, POOLED))),
            "VAE": vae("taesd"),
            "STYLE_MODEL": node("CPTestStyleModel", seen=SEEN, width=TEXT),
            "GLIGEN": node("GLIGENLoader", gligen_name="unet.safetensors"),
            "LORA_MODEL": lora("middle_block.1.transformer_blocks.0.attn1.to_q", 64),
            **({"IMAGE": ONE_PICTURE} if name != "unet" else {}),
            **seen(projected=projected),
        },
        widgets={
            "unet_name": file,
            "ckpt_name": "unet.safetensors",
            "lora_name": "unet.safetensors",
            **({"scale_ratio": 1.0} if name == "unet_4x" else {}),
        },
    )


ONE_PICTURE = node("CPTestPictures", shape=f"1,{HEIGHT},{WIDTH},3", seed=6, nonce=0)
CLIPS = {"unet_refiner": ("refiner", TEXT, TEXT), "unet_gligen": ("sd1", GLIGEN_TEXT, GLIGEN_TEXT)}


def _network(name: str) -> Bench:
    """Of the tests of networks."""
    network = SAMPLED[name]
    return Bench(
        name=name,
        loader=node("UNETLoader", unet_name=f"networks/{name}.safetensors", weight_dtype="default"),
        text={
            key: value
            for key, value in network.spec(0).items()
            if key not in (*CONDITIONS_OF_NODES.get(name, ()), "tokens")
        },
        tokens=(network.tokens, max(network.tokens, 12)),
        latent=SIZES.get(name, network.shape),
        parallel=CUT,
        cfg=1.0 if name in ONE_PROMPT else 2.0,
        gives={
            "CLIP": clip("flux", network.dim, network.more.get("pooled", 64)),
            "VAE": vae(_vae_of(network.latent[0])),
            "IMAGE": ONE_PICTURE,
            "LORA_MODEL": lora("blocks.0.attn.to_q", 192),
            **seen(*[96 if name.startswith("hunyuan_3d") else 1280] * 2),
            **MORE.get(name, {}),
        },
        widgets={"unet_name": f"networks/{name}.safetensors", **WIDGETS.get(name, {})},
    )


def _vae_of(latent: tuple[int, ...]) -> str:
    """A tiny VAE of such a latent's channels, with frames or without."""
    channels, *sides = latent
    if len(sides) > 2:
        return {16: "wan.safetensors"}.get(channels, "ltx0.safetensors")
    return {3: "pixel_space", 4: "taesd", 128: "taef2"}.get(channels, "taef1")


def patch(file: str) -> dict[str, dict[str, Any]]:
    return {"MODEL_PATCH": node("ModelPatchLoader", name=f"{file}.safetensors")}


STYLE_SEEN = node("CPTestSeen", tokens=12, width=48)  # as the tiny style network of zoo/model_patches.py reads it


def latent(shape: str) -> dict[str, Any]:
    return node("CPTestLatent", shape=shape, seed=8, masked=False, nonce=0)


# ComfyUI itself samples one picture of these at a time, or even sizes only.
SIZES = {"ltxv": "1,128,3,3,5", "flux2_klein": "1,128,9,13", "lumina2": "1,16,17,23", "causal_wan": "2,16,3,8,12"}
ONE_PROMPT = ("causal_wan", "flux2_klein")  # their nodes keep keys of one evaluation for the next
MADE = ("tensors", "values", "seen")
CONDITIONS_OF_NODES = {  # what nodes of these networks make, at sizes of their own
    **dict.fromkeys(("hunyuan_15", "wan_fun_control", "wan_scail", "wan_vace", "wandancer"), MADE),
}
WIDGETS: dict[str, dict[str, Any]] = {
    **{name: {"batch_size": 1} for name in ("hunyuan_i2v", "flux2_klein", "ltxv", "lumina2")},
    "chroma_radiance": {"width": 64, "height": 32},
    "hidream_o1": {"width": 96, "height": 64},
}
MORE: dict[str, dict[str, dict[str, Any]]] = {
    "anima": patch("anima_lllite"),
    "ltx2": {"LATENT audio_latent": latent("2,8,11,16"), "LATENT av_latent": latent("2,128,3,3,5;2,8,11,16")},
}


def benches() -> dict[str, Bench]:
    flux = TEXTS["flux_dev"]
    first = Bench(
        name="flux",
        loader=node("UNETLoader", unet_name="flux_dev.safetensors", weight_dtype="default"),
        text=flux,
        latent=f"2,16,{LATENT}",
        parallel=CUT,
        gives={
            "CLIP": clip("flux", int(flux["dim"]), int(flux["pooled"])),
            "VAE": vae("taef1"),
            "STYLE_MODEL": node("CPTestStyleModel", seen=SEEN, width=int(flux["dim"])),
            "LORA_MODEL": lora("double_blocks.0.img_attn.proj", 256),
            "MODEL_PATCH": node("ModelPatchLoader", name="uso_style.safetensors"),
            **seen(),
        },
        widgets={"unet_name": "flux_dev.safetensors", "ckpt_name": "flux_dev_full.safetensors",
               "lora_name": "flux_dev.safetensors"},
    )  # fmt: skip
    wan = Bench(
        name="wan",
        loader=node("UNETLoader", unet_name="wan_t2v.safetensors", weight_dtype="default"),
        text=TEXTS["wan_t2v"],
        latent="2,16,3,8,12",
        parallel=CUT,
        gives={"CLIP": clip("sd3", 4096, 64), "VAE": vae("wan.safetensors"), **seen(),
               "MODEL_PATCH": node("ModelPatchLoader", name="uni3c.safetensors")},
        widgets={"unet_name": "wan_t2v.safetensors"},
    )  # fmt: skip
    qwen = Bench(
        name="qwen_image",
        loader=node("UNETLoader", unet_name="qwen_image.safetensors", weight_dtype="default"),
        text=TEXTS["qwen_image"],
        latent=f"2,16,1,{LATENT}",
        parallel=CUT,
        gives={"VAE": vae("wan.safetensors"), "IMAGE": ONE_PICTURE, **patch("qwen_canny")},
        widgets={"unet_name": "qwen_image.safetensors"},
    )
    style = replace(
        first, name="flux_style", latent=f"1,16,{LATENT}", gives={**first.gives, "CLIP_VISION_OUTPUT": STYLE_SEEN}
    )
    made = [first, style, wan, qwen, *map(_unet, UNET_FILES), *map(_network, SAMPLED)]
    return {bench.name: bench for bench in made}


def write_benches(server: Server, names: Iterable[str]) -> None:
    """The files that these benches name, into the server's folders."""
    noise = torch.randn(2, 16, HEIGHT // 8, WIDTH // 8, generator=torch.Generator().manual_seed(5))
    save_file({"latent_tensor": noise}, server.base / "input" / "flux.latent")
    server.write_tiny(networks={*names} & {*SAMPLED, *WITHOUT_PLAN})
