"""Runs in ComfyUI's python: loads checkpoints as ComfyUI does and writes down calls of its `diffusion_model`.

    python record_comfyui.py COMFYUI_ROOT OVERRIDE.py JOBS.json

A job is {"path", "out", "dtype", "cases": [{"name", "latent", "sigma", "cond"}]}. Each case becomes
<out>/<name>.safetensors: the arguments of the call, its output, and in the metadata what is no tensor.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def start(root: str, override: str) -> None:
    sys.path.insert(0, root)
    sys.argv = ["main.py", "--cpu", "--use-pytorch-cross-attention"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.cli_args
    import comfy.model_management

    comfy.model_management.should_use_bf16 = lambda *args, **kwargs: True  # compute in bf16 on the CPU too
    logging.disable(logging.INFO)
    spec = importlib.util.spec_from_file_location("tiny_override", override)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.install_tiny_override()


def conditioning(spec: dict[str, Any], seed: int) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    options = dict(spec["options"])
    if spec.get("pooled"):
        options["pooled_output"] = normal(1, spec["pooled"])
    if spec.get("mask"):
        options["attention_mask"] = (torch.arange(spec["text"][0]) < spec["mask"]).long()[None]
    if spec.get("clip_vision"):
        options["clip_vision_output"] = SimpleNamespace(penultimate_hidden_states=normal(1, *spec["clip_vision"]))
    if spec.get("concat"):
        options["concat_latent_image"] = normal(1, *spec["concat"])
    if spec.get("references"):
        options["reference_latents"] = [normal(1, *shape) for shape in spec["references"]]
    return [[normal(1, *spec["text"]), options]]


def model_conds(model: Any, case: dict[str, Any], x: Tensor) -> dict[str, Any]:
    import comfy.sampler_helpers
    import comfy.samplers

    conds = comfy.sampler_helpers.convert_cond(conditioning(case["cond"], seed=11))
    image, keep = torch.zeros_like(x), None
    if case["keep_frames"]:  # as SetLatentNoiseMask and the image to video nodes do
        keep = torch.ones_like(x)
        keep[:, :, : case["keep_frames"]] = 0.25
    encoded = comfy.samplers.encode_model_conds(
        model.extra_conds, conds, x, x.device, "positive", latent_image=image, denoise_mask=keep, seed=0
    )
    return {k: v.process_cond(batch_size=x.shape[0], area=None).cond for k, v in encoded[0]["model_conds"].items()}


def record(model: Any, case: dict[str, Any], out: Path) -> None:
    x = torch.randn(case["latent"], generator=torch.Generator().manual_seed(7))
    calls: list[tuple[Any, ...]] = []
    forward = model.diffusion_model.forward

    def spy(x: Tensor, timestep: Tensor, context: Any = None, **kwargs: Any) -> Tensor:
        arguments = x.clone(), timestep.clone(), {"c_crossattn": context, **kwargs}
        calls.append((*arguments, forward(x.clone(), timestep, context=context, **kwargs)))
        return calls[-1][-1]

    model.diffusion_model.forward = spy
    try:
        model.apply_model(x, torch.full((x.shape[0],), case["sigma"]), **model_conds(model, case, x))
    finally:
        model.diffusion_model.forward = forward
    ((x, timestep, kwargs, output),) = calls
    kwargs = {k: v for k, v in kwargs.items() if k not in ("transformer_options", "control") and v is not None}
    lists = {f"cond.{k}.{i}": t for k, v in kwargs.items() if isinstance(v, list) for i, t in enumerate(v)}
    conds = {f"cond.{k}": v for k, v in kwargs.items() if torch.is_tensor(v)}
    plain = {k: v for k, v in kwargs.items() if not torch.is_tensor(v) and not isinstance(v, list)}
    hints = {k: v for k, v in model.model_config.unet_config.items() if _is_plain(v)}
    told = {"hints": json.dumps(hints), "plain": json.dumps(plain)}
    kept = {"x": x, "timestep": timestep, "output": output, **conds, **lists}
    save_file({k: v.contiguous().clone() for k, v in kept.items()}, out / f"{case['name']}.safetensors", metadata=told)


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def main(root: str, override: str, jobs: str) -> None:
    torch.set_num_threads(1)
    start(root, override)
    import comfy.sd

    with torch.inference_mode():
        for job in json.loads(Path(jobs).read_text()):
            dtype = getattr(torch, job["dtype"])
            model = comfy.sd.load_diffusion_model(job["path"], model_options={"dtype": dtype}).model
            assert model.get_dtype_inference() == dtype, (job["path"], model.get_dtype_inference())
            Path(job["out"]).mkdir(parents=True, exist_ok=True)
            for case in job["cases"]:
                record(model, case, Path(job["out"]))


if __name__ == "__main__":
    main(*sys.argv[1:])
