"""ComfyUI's own sampling loop on this rank, around our transformer. Knows no model family and no parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...specs import ComfySetup, EvaluationJob, SamplingJob
from ..models import Model
from ..pulse import Pulse
from .comfyui import import_comfyui


def start(setup: ComfySetup, device: torch.device) -> dict[type, Callable[[Model, Any, Pulse], dict[str, Any]]]:
    """Import the host's ComfyUI as the host runs it; returns a loop for each kind of job that needs it.

    Call once, before any other import of comfy.
    """
    import_comfyui(setup, device)
    from .evaluation import Evaluations  # comfy can be imported only now
    from .sampling import run

    return {SamplingJob: run, EvaluationJob: Evaluations()}
