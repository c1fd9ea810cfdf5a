"""Another pack has replaced ComfyUI's own code in ComfyUI's process: what a run on the workers makes of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from .callback_scenes import ONE, demo, errors, remote, run_arguments

import comfy.ldm.flux.layers  # isort: skip  # the scenes have made ComfyUI importable
import comfy.lora  # isort: skip
import comfy.k_diffusion.sampling  # isort: skip
import comfy.model_base  # isort: skip
import comfy.sample  # isort: skip
import comfy.samplers  # isort: skip
import torch  # isort: skip

FILE = "/somewhere/custom_nodes/a_pack/nodes.py"
SOURCE = """
import functools

def around(original):
    @functools.wraps(original)
    def replaced(*args, **kwargs):
        out = original(*args, **kwargs)
        return out * 0.5
    return replaced

def kind_of(original):
    class Replaced(original):
        def predict_noise(self, *args, **kwargs):
            return super().predict_noise(*args, **kwargs) * 0.5
    return Replaced
"""
PLACES: dict[str, tuple[Any, str]] = {
    "a function of the loop": (comfy.samplers, "sampling_function"),
    "a method of the loop": (comfy.samplers.CFGGuider, "predict_noise"),
    "a class of the loop": (comfy.samplers, "CFGGuider"),
    "a method of the model": (comfy.model_base.BaseModel, "_apply_model"),
    "an algorithm": (comfy.k_diffusion.sampling, "sample_euler"),
    "a function of the network": (comfy.ldm.flux.layers, "apply_mod"),
    "a function that merges": (comfy.lora, "calculate_weight"),
    "an algorithm of its own": (comfy.k_diffusion.sampling, "sample_of_a_pack"),
    "an object's method": (None, "apply_model"),
}


def sampled_with(rank: int, world: int) -> dict[str, dict[str, Any]]:
    """By what is replaced: does a run give ComfyUI's latent meanwhile, and where did its loop run; or the refusal."""
    return {replaced: _sampled_with(replaced) for replaced in PLACES}


def _sampled_with(replaced: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "a_pack"}
    exec(compile(SOURCE, FILE, "exec"), space)  # as a file of that folder is imported
    model = demo.CPDemoModel.execute().result[0]
    plain = comfy.sample.sample(model, *run_arguments(), disable_pbar=True, seed=5)
    owner, name = PLACES[replaced]
    owner = model.model if owner is None else owner
    if replaced == "a function that merges":
        weight = next(key for key in model.model.state_dict() if key.endswith("img_attn.proj.weight"))
        model.add_patches({weight: (torch.ones_like(model.model.state_dict()[weight]) * 0.01,)})
    original = getattr(owner, name, comfy.k_diffusion.sampling.sample_heun)
    change: Callable[[Any], Any] = space["kind_of" if isinstance(original, type) else "around"]
    heard = Heard()
    log = logging.getLogger(remote.__name__)
    log.addHandler(heard)
    log.setLevel(logging.INFO)
    try:
        with patch.object(owner, name, change(original), create=True):
            want = comfy.sample.sample(model, *run_arguments(), disable_pbar=True, seed=5)
            got = comfy.sample.sample(remote.model_on_workers(model, ONE), *run_arguments(), disable_pbar=True, seed=5)
    except errors.Refused as refused:
        return {"refused": str(refused)}
    finally:
        log.removeHandler(heard)
    return {"does something": not torch.equal(want, plain), "equal": torch.equal(got, want), "said": heard.lines}


class Heard(logging.Handler):
    """Why the loop stays in ComfyUI's process."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "because" in (line := record.getMessage()):
            self.lines.append(line.partition(" because ")[2])
