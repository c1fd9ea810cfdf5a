"""ComfyUI's own sampling loop on this rank, around its own networks. Knows no model family."""

from __future__ import annotations

from functools import partial

import torch

from ...jobs import EncodingJob, EvaluationJob, SamplingJob, VAEJob
from ...specs import ComfySetup
from ..models import Load, Loop
from .comfyui import import_comfyui


def start(setup: ComfySetup, device: torch.device) -> tuple[dict[type, Loop], dict[type, Load]]:
    """Imports the host's ComfyUI with the host's flags; returns the loops, and the loaders of models, of the kinds of
    jobs that need it. Call it once, before any other import of comfy."""
    import_comfyui(setup, device)
    from . import autoencoder, text_encoder  # comfy can be imported only now
    from .additional_models import AdditionalModels
    from .comfy_model import load
    from .evaluation import evaluate
    from .sampling import run

    load_model = partial(load, AdditionalModels())
    loaders: dict[type, Load] = {
        SamplingJob: load_model,
        EvaluationJob: load_model,
        VAEJob: autoencoder.load,
        EncodingJob: text_encoder.load,
    }
    loops: dict[type, Loop] = {
        SamplingJob: run,
        EvaluationJob: evaluate,
        VAEJob: partial(autoencoder.run, {}),
        EncodingJob: text_encoder.run,
    }
    return loops, loaders
