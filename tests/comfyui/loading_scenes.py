"""How a worker loads a file, as on a host with a GPU: no GPU is needed for the part that the file's dtypes show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ..zoo.checkpoints import write
from .pack import pack_module

import comfy.model_management  # isort: skip  # the pack's module has made ComfyUI importable
import comfy.sd  # isort: skip

comfy_model, additional = (
    pack_module(f"parallel_runtime.worker.comfy_loop.{name}") for name in ("comfy_model", "additional_models")
)
mapped, specs = pack_module("parallel_runtime.loading.mapped"), pack_module("parallel_runtime.specs")
ROUNDED = "float8_e4m3fn"


def rounded(rank: int, world: int, folder: str, dynamic_vram: bool) -> dict[str, list[str]]:
    """The dtypes of small and of large layers, and of those of them that a patch is merged into."""
    path = write(Path(folder), "flux_schnell")
    options = {"dtype": {"torch.dtype": ROUNDED}}
    spec = specs.ModelSpec(
        loader="comfy.sd:load_diffusion_model", arguments=json.dumps([str(path), options]), weight_dtype=ROUNDED,
        dynamic_vram=dynamic_vram,
    )  # fmt: skip
    device = torch.device("cpu")
    model = comfy_model.load(additional.AdditionalModels(), spec, device, lambda done: None, None)
    patcher = model.patcher.clone()
    patcher.on_progress = lambda done: None
    modules = patcher.model.named_modules()
    layers = {name: layer for name, layer in modules if getattr(layer, "weight", None) is not None}
    assert all(hasattr(layer, "comfy_cast_weights") for layer in layers.values())
    large = {name for name, layer in layers.items() if comfy.model_management.module_size(layer) > 16 * 1024}
    merged = [next(name for name in layers if (name in large) == of_large) for of_large in (False, True)]
    ones = {f"{name}.weight": torch.ones(layers[name].weight.shape) for name in merged}
    patcher.add_patches({key: (value,) for key, value in ones.items()})
    patcher.partially_load(device)
    groups = {"small": layers.keys() - large - {*merged}, "large": large - {*merged}, "merged": merged}
    return {what: sorted({str(layers[name].weight.dtype) for name in names}) for what, names in groups.items()}


def at_once(rank: int, world: int, path: str) -> dict[str, Any]:
    """Of a checkpoint that ComfyUI alone would load to a GPU at once: is it loaded, and what is as before after it?"""
    before, loaded = comfy.model_management.unet_inital_load_device, []
    comfy.model_management.unet_inital_load_device = on_a_gpu = lambda *_: torch.device("meta")
    of_class = type("Noted", (mapped.Mapped,), {"load": lambda self, *_, **__: loaded.append(self)})
    try:
        made = mapped.load_mapped(of_class, comfy.sd.load_checkpoint_guess_config, [path, False, False], 0)
        restored = comfy.model_management.unet_inital_load_device is on_a_gpu
    finally:
        comfy.model_management.unet_inital_load_device = before
    return {"views": len(made.file_views) > 0, "loaded": len(loaded), "restored": restored}
