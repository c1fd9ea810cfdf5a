"""The latents that a run left behind, and how far two of them are apart."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from .client import FinishedPrompt


def latent_of(run: FinishedPrompt) -> torch.Tensor:
    return saved_latents(run)["save"]


def saved_latents(run: FinishedPrompt) -> dict[str, torch.Tensor]:
    """By the name of the node that saved it."""
    saved = {name: shown["cp_test"][0]["path"] for name, shown in run.outputs.items() if "cp_test" in shown}
    return {name: load_file(Path(path))["samples"] for name, path in saved.items()}


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, in units of the standard deviation of what is wanted."""
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, KSampler gives {tuple(want.shape)}"
    assert got.dtype == want.dtype, f"{got.dtype}, KSampler gives {want.dtype}"
    assert torch.isfinite(got).all(), "not finite"
    return ((got - want).abs().max() / want.std()).item()
