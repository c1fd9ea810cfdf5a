"""ComfyUI's own sampling loop on this rank, around its own networks. Knows no model family and no parallelism."""

from __future__ import annotations

from functools import partial

import torch

from ...jobs import EvaluationJob, SamplingJob
from ...specs import ComfySetup
from ..models import VAE, Load, Loop
from .comfyui import import_comfyui


def start(setup: ComfySetup, device: torch.device) -> tuple[dict[type, Loop], dict[str, Load]]:
    """Imports the host's ComfyUI with the host's flags; returns a loop for each kind of job that needs it, and the
    loaders of its models and VAEs. Call it once, before any other import of comfy.
    """
    import_comfyui(setup, device)
    from . import autoencoder  # comfy can be imported only now
    from .additional_models import AdditionalModels
    from .evaluation import Evaluations
    from .loading import load
    from .sampling import run

    return {SamplingJob: run, EvaluationJob: Evaluations()}, {
        "": partial(load, AdditionalModels()),
        VAE: autoencoder.load,
    }
