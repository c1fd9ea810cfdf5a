"""What many workflows have in common: text in, a picture or a video out, workers in between."""

from __future__ import annotations

from typing import Any

from . import files
from .graph import File, Link, Node, Template

Source = Node | Link


def model(t: Template, file: File, *, weight_dtype: str = "default") -> Node:
    return t.add("UNETLoader", 0, unet_name=file, weight_dtype=weight_dtype)


def text(t: Template, clip: Source, words: str, *, title: str = "Prompt", column: int = 1) -> Node:
    return t.add("CLIPTextEncode", column, title=title, clip=clip, text=words)


def flux_text(t: Template, words: str) -> tuple[Node, Node]:
    """VAE and prompt of FLUX.1."""
    clip = t.add("DualCLIPLoader", 0, clip_name1=files.CLIP_L, clip_name2=files.T5, type="flux")
    return t.add("VAELoader", 0, vae_name=files.AE), text(t, clip, words)


def guided(t: Template, prompt: Node, guidance: float) -> tuple[Node, Node]:
    """A prompt with the guidance that the network was distilled for, and nothing in the negative prompt's place."""
    return t.add("FluxGuidance", 2, conditioning=prompt, guidance=guidance), nothing(t, prompt)


def nothing(t: Template, prompt: Node) -> Node:
    return t.add("ConditioningZeroOut", 2, conditioning=prompt)


def on_workers(t: Template, clip: Source, cut: Node) -> Node:
    """The CLIP with its text encoder in the workers."""
    return t.add("CPCLIP", 1, clip=clip, cp_config=cut)


def qwen_text(t: Template) -> tuple[Node, Node]:
    """Text encoder and VAE of Qwen-Image."""
    clip = t.add("CLIPLoader", 0, clip_name=files.QWEN_TEXT, type="qwen_image")
    return clip, t.add("VAELoader", 0, vae_name=files.QWEN_VAE)


def empty(t: Template, width: int, height: int) -> Node:
    return t.add("EmptySD3LatentImage", 1, width=width, height=height, batch_size=1)


def config(t: Template, column: int = 2, **degrees: Any) -> Node:
    """Degrees that are not given are auto."""
    return t.add("CPParallelConfig", column, **degrees)


def sampler(t: Template, column: int, **inputs: Any) -> Node:
    usual: dict[str, Any] = {"seed": 1, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    return t.add("CPSampler", column, **{**usual, **inputs})


def picture(t: Template, column: int, samples: Source, vae: Source) -> None:
    decoded = t.add("VAEDecode", column, samples=samples, vae=vae)
    t.add("SaveImage", column + 1, images=decoded, filename_prefix=t.name)


def film(t: Template, column: int, samples: Source, vae: Source, *, fps: float, audio: Source | None = None) -> None:
    save(t, column + 1, t.add("VAEDecode", column, samples=samples, vae=vae), fps=fps, audio=audio)


def save(t: Template, column: int, images: Source, *, fps: float, audio: Source | None = None) -> None:
    sound = {} if audio is None else {"audio": audio}
    video = t.add("CreateVideo", column, images=images, fps=fps, **sound)
    t.add("SaveVideo", column + 1, video=video, filename_prefix=f"video/{t.name}")
