"""ComfyUI's own sampling loop on this rank, around its own networks. Knows no model family and no parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...jobs import EvaluationJob, SamplingJob
from ...specs import ComfySetup
from ..models import VAE
from ..pulse import Pulse
from .comfyui import import_comfyui

Loop = Callable[[Any, Any, Pulse], dict[str, Any]]


def start(setup: ComfySetup, device: torch.device) -> tuple[dict[type, Loop], dict[str, Any]]:
    """Import the host's ComfyUI as the host runs it; returns a loop for each kind of job that needs it, and the loaders
    of its models and VAEs. Call once, before any other import of comfy.
    """
    import_comfyui(setup, device)
    from . import autoencoder
    from .evaluation import Evaluations  # comfy can be imported only now
    from .loading import load
    from .sampling import run

    return {SamplingJob: run, EvaluationJob: Evaluations()}, {"": load, VAE: autoencoder.load}
