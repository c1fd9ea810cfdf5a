"""Where a test graph begins and ends: seeded conditioning and latents in, the raw latent out as a file."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import comfy.clip_vision
import comfy.nested_tensor
import folder_paths
import safetensors.torch
import torch
from comfy_api.latest import io

CATEGORY = "cp test"


class Conditioning(io.ComfyNode):
    """`spec`: tokens, dim and optionally pooled (its width), guidance, mask_valid (the first n tokens count), tensors
    (name to a shape, or to a list of shapes), numbers (name to a tensor's values), seen (the shape of what CLIP vision
    saw) and values (name to value)."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestConditioning",
            category=CATEGORY,
            is_dev_only=True,
            inputs=[io.String.Input("spec"), io.Int.Input("seed", min=0, max=2**31)],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, spec: str, seed: int) -> io.NodeOutput:
        return io.NodeOutput(conditioning(json.loads(spec), torch.Generator().manual_seed(seed)))


class Latent(io.ComfyNode):
    """Zeros (seed -1), NaN (seed -2) or seeded randn, of one shape or of several parts ("1,2;3,4"); `masked` adds as
    many noise masks, each of which keeps another part; a new `nonce` makes ComfyUI sample again what it has cached."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestLatent",
            category=CATEGORY,
            is_dev_only=True,
            inputs=[
                io.String.Input("shape"),
                io.Int.Input("seed", min=-2, max=2**31),
                io.Int.Input("masked", min=0, max=8),
                io.Int.Input("nonce", min=0, max=2**31),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, shape: str, seed: int, masked: int, nonce: int) -> io.NodeOutput:
        parts = [_filled([int(size) for size in part.split(",")], seed) for part in shape.split(";")]
        latent = {"samples": _together(parts)}
        if masked:
            latent["noise_mask"] = _together([_masks(masked, part) for part in parts])
        return io.NodeOutput(latent)


class Wait(io.ComfyNode):
    """Conditioning that takes as long as a real text encoder: so many seconds, or until there is a `file`."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestWait",
            category=CATEGORY,
            is_dev_only=True,
            inputs=[
                io.Conditioning.Input("conditioning"),
                io.Float.Input("seconds"),
                io.String.Input("file", optional=True),
            ],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, conditioning: list[list[Any]], seconds: float, file: str = "") -> io.NodeOutput:
        ends = time.monotonic() + seconds
        while time.monotonic() < ends and not (file and Path(file).exists()):
            time.sleep(0.05)
        return io.NodeOutput(conditioning)


class SaveLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestSaveLatent",
            category=CATEGORY,
            is_dev_only=True,
            is_output_node=True,
            inputs=[io.Latent.Input("samples"), io.String.Input("name")],
        )

    @classmethod
    def execute(cls, samples: dict[str, Any], name: str) -> io.NodeOutput:
        path = Path(folder_paths.get_output_directory()) / f"{name}.safetensors"
        latent = samples["samples"]
        if latent.is_nested:
            latent = torch.cat([part.flatten() for part in latent.unbind()])
        safetensors.torch.save_file({"samples": latent.contiguous().cpu()}, path)
        return io.NodeOutput(ui={"cp_test": [{"path": str(path), "keys": sorted(samples)}]})


def _filled(sizes: list[int], seed: int) -> torch.Tensor:
    if seed >= 0:
        return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))
    return torch.full(sizes, 0.0 if seed == -1 else math.nan)


def _masks(count: int, latent: torch.Tensor) -> torch.Tensor:
    """[count, 1, ...] of a latent's sides: 0 on a third of its columns, from another column on in each."""
    width = latent.shape[-1]
    masks = torch.ones(count, 1, *latent.shape[2:] if count > 1 else latent.shape[-2:])
    for index, mask in enumerate(masks):
        start = index * width // 4
        mask[..., start : start + width // 3] = 0
    return masks


def _together(parts: list[torch.Tensor]) -> Any:
    return comfy.nested_tensor.NestedTensor(parts) if len(parts) > 1 else parts[0]


def conditioning(spec: dict[str, Any], dice: torch.Generator) -> list[list[Any]]:
    text = torch.randn(1, spec["tokens"], spec["dim"], generator=dice)
    options: dict[str, Any] = {}
    if "pooled" in spec:
        options["pooled_output"] = torch.randn(1, spec["pooled"], generator=dice)
    if "guidance" in spec:
        options["guidance"] = float(spec["guidance"])
    if "mask_valid" in spec:
        options["attention_mask"] = (torch.arange(spec["tokens"]) < spec["mask_valid"]).long()[None]
    for name, shape in spec.get("tensors", {}).items():
        options[name] = _drawn(shape, dice)
    for name, values in spec.get("numbers", {}).items():
        options[name] = torch.tensor(values)
    if "seen" in spec:
        seen = options["clip_vision_output"] = comfy.clip_vision.Output()
        seen["penultimate_hidden_states"] = seen["last_hidden_state"] = _drawn(spec["seen"], dice)
        seen["image_sizes"] = [torch.Size((3, 224, 224))]
    return [[text, options | _with_tensors(spec.get("values", {}), dice)]]


def _with_tensors(value: Any, dice: torch.Generator) -> Any:
    """`value` with a tensor for each {"drawn": shape} in it."""
    match value:
        case {"drawn": shape}:
            return _drawn(shape, dice)
        case dict():
            return {name: _with_tensors(one, dice) for name, one in value.items()}
        case list():
            return [_with_tensors(one, dice) for one in value]
    return value


def _drawn(shape: list[Any], dice: torch.Generator) -> Any:
    if isinstance(shape[0], list):
        return [_drawn(one, dice) for one in shape]
    return torch.randn(shape, generator=dice)
