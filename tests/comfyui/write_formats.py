"""Writes tiny models in every format that ComfyUI reads: `python write_formats.py COMFYUI FOLDER SOURCE ...`.

Runs in ComfyUI's Python: the quantised ones are made by its own code.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
PLAIN = {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
QUANTISED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # layout, of the layer's JSON, of quantising
    "comfy_fp8": ("float8_e4m3fn", {}, {"scale": "recalculate"}),
    "mxfp8": ("mxfp8", {}, {}),
    "nvfp4": ("nvfp4", {}, {}),
    "int8": ("int8_tensorwise", {}, {}),
    "int8_convrot": (
        "int8_tensorwise",
        {"convrot": True, "convrot_groupsize": 64},
        {"per_channel": True, "convrot": True, "convrot_groupsize": 64},
    ),
}
FORMATS = (*HALF, *PLAIN, "scaled_fp8_old", "scaled_fp8", "fp8_mixed", *QUANTISED)


def main(comfyui: str, folder: str, *sources: str) -> None:
    sys.path[0] = comfyui  # not this folder, which has a module comfy
    sys.argv = ["main.py", "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    for source in sources:
        write_all(Path(source), Path(folder))


def write_all(source: Path, folder: Path) -> None:
    weights = load_file(source)
    with safe_open(source, framework="pt") as file:
        metadata = file.metadata() or {}
    for name in FORMATS:
        out, more = written(weights, name)
        path = folder / f"{source.stem}_{name}.safetensors"
        save_file({key: value.contiguous() for key, value in out.items()}, path, metadata={**metadata, **more})


def written(weights: dict[str, Tensor], name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    if name in HALF:
        return {key: value.to(HALF[name]) for key, value in weights.items()}, {}
    if name in PLAIN:
        return {key: value.to(PLAIN[name]) for key, value in weights.items()}, {}
    if name in QUANTISED:
        return quantised(weights, *QUANTISED[name]), {}
    return scaled(weights, old=name == "scaled_fp8_old", every=2 if name == "fp8_mixed" else 1)


def scaled(weights: dict[str, Tensor], *, old: bool, every: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """One scale a matrix: named as before ComfyUI had a format of its own, or said in the file's metadata."""
    out = {key: value.to(torch.bfloat16) for key, value in weights.items()}
    layers = {}
    for key in [key for key in weights if in_a_block(key, weights[key])][::every]:
        scale, layer = weights[key].abs().max() / 448, key.removesuffix(".weight")
        out[key] = (weights[key] / scale).to(torch.float8_e4m3fn)
        out[f"{layer}.scale_weight" if old else f"{layer}.weight_scale"] = scale
        layers[layer] = {"format": "float8_e4m3fn"}
    if old:
        return {**out, "scaled_fp8": torch.zeros(0, dtype=torch.float8_e4m3fn)}, {}
    return out, {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}


def quantised(
    weights: dict[str, Tensor], layout: str, config: dict[str, Any], how: dict[str, Any]
) -> dict[str, Tensor]:
    from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor

    out = {key: value.to(torch.bfloat16) for key, value in weights.items()}
    for key in [key for key in weights if in_a_block(key, weights[key])]:
        made = QuantizedTensor.from_float(out.pop(key), QUANT_ALGOS[layout]["comfy_tensor_layout"], **how)
        out.update(made.state_dict(key))
        layer_config = json.dumps({"format": layout, **config}).encode()
        out[f"{key.removesuffix('.weight')}.comfy_quant"] = torch.tensor(list(layer_config), dtype=torch.uint8)
    return out


def in_a_block(key: str, value: Tensor) -> bool:
    return key.endswith(".weight") and value.ndim == 2 and "blocks." in key and ".mod" not in key


if __name__ == "__main__":
    main(*sys.argv[1:])
