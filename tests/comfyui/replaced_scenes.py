"""Another pack has replaced ComfyUI's own code in ComfyUI's process: what a run on the workers makes of it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

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
import functools, torch
from comfy.model_patcher import ModelPatcher

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

class Layer(torch.nn.Module):
    def __init__(self, original):
        super().__init__()
        self.original = original

    def forward(self, x):
        return self.original(x) * 0.5

class Patcher(ModelPatcher):
    pass
"""
a_pack = ModuleType("a_pack")
a_pack.__file__ = FILE
sys.modules["a_pack"] = a_pack
exec(compile(SOURCE, FILE, "exec"), vars(a_pack))  # as a file of that folder is imported

PLACES: dict[str, Callable[[Any], tuple[Any, str]]] = {  # of a MODEL
    "a function of the loop": lambda model: (comfy.samplers, "sampling_function"),
    "a method of the loop": lambda model: (comfy.samplers.CFGGuider, "predict_noise"),
    "a class of the loop": lambda model: (comfy.samplers, "CFGGuider"),
    "a method of the model": lambda model: (comfy.model_base.BaseModel, "_apply_model"),
    "an algorithm": lambda model: (comfy.k_diffusion.sampling, "sample_euler"),
    "an algorithm of its own": lambda model: (comfy.k_diffusion.sampling, "sample_of_a_pack"),
    "a function of the network": lambda model: (comfy.ldm.flux.layers, "apply_mod"),
    "a function that merges": lambda model: (comfy.lora, "calculate_weight"),
    "an object's method": lambda model: (model.model, "apply_model"),
    "a layer": lambda model: (model.model.diffusion_model, "final_layer"),
    "a MODEL's method": lambda model: (model, "model_dtype"),
    "a MODEL's class": lambda model: (model, "__class__"),
}


def sampled_with(rank: int, world: int) -> dict[str, dict[str, Any]]:
    """By what is replaced: does a run give ComfyUI's latent meanwhile, and where did its loop run; or the refusal."""
    return {replaced: _sampled_with(replaced) for replaced in PLACES}


def _sampled_with(replaced: str) -> dict[str, Any]:
    model = demo.CPDemoModel.execute().result[0]
    plain = comfy.sample.sample(model, *run_arguments(), disable_pbar=True, seed=5)
    owner, name = PLACES[replaced](model)
    if replaced == "a function that merges":
        weight = next(key for key in model.model.state_dict() if key.endswith("img_attn.proj.weight"))
        model.add_patches({weight: (torch.ones_like(model.model.state_dict()[weight]) * 0.01,)})
    heard = Heard()
    log = logging.getLogger(remote.__name__)
    log.addHandler(heard)
    log.setLevel(logging.INFO)
    try:
        with _replaced(owner, name, _of_the_pack(replaced, getattr(owner, name, None))):
            got = comfy.sample.sample(remote.model_on_workers(model, ONE), *run_arguments(), disable_pbar=True, seed=5)
            want = comfy.sample.sample(model, *run_arguments(), disable_pbar=True, seed=5)
    except errors.Refused as refused:
        return {"refused": str(refused)}
    finally:
        log.removeHandler(heard)
    return {"does something": not torch.equal(want, plain), "equal": torch.equal(got, want), "said": heard.lines}


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """As a pack does it, and taken back: also for a class and a layer, which `unittest.mock` would delete."""
    before, of_kind = getattr(owner, name, None), hasattr(type(owner), name) and name not in vars(owner)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None or (of_kind and name != "__class__"):
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _of_the_pack(replaced: str, original: Any) -> Any:
    if replaced == "a layer":
        return a_pack.Layer(original)
    if replaced == "a MODEL's class":
        return a_pack.Patcher
    return a_pack.kind_of(original) if isinstance(original, type) else a_pack.around(original or _leave)


def _leave(x: torch.Tensor) -> torch.Tensor:
    return x


class Heard(logging.Handler):
    """Why the loop stays in ComfyUI's process."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "because" in (line := record.getMessage()):
            self.lines.append(line.partition(" because ")[2])
