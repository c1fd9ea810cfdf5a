"""What goes into the demo's network and what comes out: plain words to conditioning, FLUX-shaped latents to pictures.

Each known word is a row of a Hadamard matrix, so that all are orthogonal. Nothing of it is learned or stored; a reader
needs only the vocabulary.

Pictures are a fixed linear map of 16 channels onto patches of 8x8: a principal component analysis of drawn pictures,
kept in codec.safetensors; tests/demo_training/fitting.py made it. Latents are in ComfyUI's LATENT space: after FLUX's
own (latent - 0.1159) * 0.3611 they have about unit variance. Knows no model."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..jobs import DemoJob

COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "white", "black")
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "heart", "diamond")
SIZES = ("small", "large")
PLACES = ("left", "right", "top", "bottom", "center")
GRAMMAR = ("a", "at", "in", "on", "background")
SYNONYMS = {
    "an": "a", "the": "a", "big": "large", "little": "small", "tiny": "small", "middle": "center", "centre": "center",
    "plus": "cross", "disc": "circle", "violet": "purple",
}  # fmt: skip
WIDTH = 64
BACKDROPS = tuple(f"{colour} background" for colour in COLOURS)
KNOWN_WORDS = ("start", *COLOURS, *BACKDROPS, *SHAPES, *SIZES, *PLACES, *GRAMMAR)
LONGEST = WIDTH - 1 - len(KNOWN_WORDS)
# FLUX tells an image token where it is only by its rotation against text tokens, which all sit at the origin. Tokens
# that every prompt has give this small model enough of them to find its place by.
REGISTERS = 16
FILE = Path(__file__).parent / "codec.safetensors"
PATCH, CHANNELS = 8, 16
SCALE, SHIFT = 0.3611, 0.1159
KINDS = {"shape": SHAPES, "colour": COLOURS, "background": BACKDROPS, "size": SIZES, "place": PLACES}


def vocabulary() -> list[str]:
    return sorted({*COLOURS, *SHAPES, *SIZES, *PLACES, *GRAMMAR, *SYNONYMS})


def parse(prompt: str) -> list[str]:
    """Returns the prompt as names of KNOWN_WORDS; a colour that names the backdrop becomes '<colour> background'."""
    words = [SYNONYMS.get(word, word) for word in prompt.lower().replace(",", " ").replace(".", " ").split()]
    for word in words:
        if word not in KNOWN_WORDS:
            raise ValueError(f"the demo model does not know the word '{word}'; it knows: {', '.join(vocabulary())}")
    if len(words) >= LONGEST:
        raise ValueError(f"the prompt has {len(words)} words; the demo model reads at most {LONGEST - 1}")
    names = [f"{word} background" if _is_backdrop(words, i) else word for i, word in enumerate(words)]
    for kind, members in KINDS.items():
        named = [name for name in names if name in members]
        if len(named) > 1:
            raise ValueError(f"the prompt names more than one {kind} ({', '.join(named)}); the demo model draws one")
    return names


def encode(prompt: str) -> tuple[Tensor, Tensor]:
    """Returns cross_attn [1, 17 + words, 64] and pooled [1, 64]; an empty prompt is valid and means anything."""
    names = parse(prompt)
    table = torch.ones(1, 1)  # becomes Hadamard's
    while len(table) < WIDTH:
        table = torch.cat([torch.cat([table, table], 1), torch.cat([table, -table], 1)])
    positions = torch.tensor([1 + KNOWN_WORDS.index(name) for name in ["start", *names]])
    places = 1 + len(KNOWN_WORDS) + torch.arange(len(positions))
    meant = [1 + KNOWN_WORDS.index(name) for name in names if name not in GRAMMAR]
    pooled = table[torch.tensor(meant, dtype=torch.long)].sum(0, keepdim=True)
    registers = torch.randn(REGISTERS, WIDTH, generator=torch.Generator().manual_seed(0)).sign() * 2**0.5
    return torch.cat([registers, table[positions] + table[places]])[None], pooled


def conditions(prompt: str) -> dict[str, Any]:
    """Returns the prompt under the names that ComfyUI's model conditions have."""
    cross_attn, pooled = encode(prompt)
    return {"c_crossattn": cross_attn, "y": pooled}


def demo_job(prompt: str, noise: Tensor, *, steps: int, cfg: float) -> DemoJob:
    sigmas = torch.linspace(1, 0, steps + 1)
    return DemoJob(noise=noise, sigmas=sigmas, cfg=cfg, positive=conditions(prompt), negative=conditions(""))


def _is_backdrop(words: list[str], i: int) -> bool:
    if words[i] not in COLOURS:
        return False
    if "background" in words:
        return words[i + 1 : i + 2] == ["background"]
    return "on" in words[:i] and any(word in SHAPES or word in COLOURS for word in words[:i])


def decode(latent: Tensor) -> Tensor:
    """Returns the pictures [B, 8h, 8w, 3], in 0..1, of a LATENT [B, 16, h, w]."""
    codec = tensors()
    mixed = (latent.float().cpu() - SHIFT) * SCALE
    patches = torch.einsum("bchw,cp->bphw", mixed, codec["decode"]) + codec["mean"][:, None, None]
    return torch.nn.functional.pixel_shuffle(patches, PATCH).permute(0, 2, 3, 1).clamp(0, 1)


@cache
def tensors() -> dict[str, Tensor]:
    """Returns the `mean` of a patch, and `encode` and `decode` [channels, patch], which are nearly inverse."""
    return load_file(FILE)
