"""ComfyUI's own sampling loop on this rank, around our transformer. Knows no model family and no parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...specs import ComfySetup, SamplingJob
from ..models import Model
from ..pulse import Pulse
from .comfyui import import_comfyui


def start(setup: ComfySetup, device: torch.device) -> Callable[[Model, SamplingJob, Pulse], dict[str, Any]]:
    """Import the host's ComfyUI as the host runs it; returns the loop. Call once, before any other import of comfy."""
    import_comfyui(setup, device)
    from .sampling import run  # comfy can be imported only now

    return run
