"""Where a test graph begins and ends: seeded conditioning and latents in, the raw latent out as a file."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import folder_paths
import safetensors.torch
import torch
from comfy_api.latest import io

CATEGORY = "cp test"


class Conditioning(io.ComfyNode):
    """`spec`: tokens, dim and optionally pooled (its width), guidance, mask_valid (the first n tokens count)."""

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
        return io.NodeOutput(_conditioning(json.loads(spec), torch.Generator().manual_seed(seed)))


class Latent(io.ComfyNode):
    """Zeros (seed -1), NaN (seed -2) or seeded randn; `masked` adds a noise_mask that keeps the left part; a new
    `nonce` makes ComfyUI sample again what it has cached."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestLatent",
            category=CATEGORY,
            is_dev_only=True,
            inputs=[
                io.String.Input("shape"),
                io.Int.Input("seed", min=-2, max=2**31),
                io.Boolean.Input("masked"),
                io.Int.Input("nonce", min=0, max=2**31),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, shape: str, seed: int, masked: bool, nonce: int) -> io.NodeOutput:
        sizes = [int(size) for size in shape.split(",")]
        if seed >= 0:
            samples = torch.randn(sizes, generator=torch.Generator().manual_seed(seed))
        else:
            samples = torch.full(sizes, 0.0 if seed == -1 else math.nan)
        latent: dict[str, torch.Tensor] = {"samples": samples}
        if masked:
            latent["noise_mask"] = torch.ones(1, 1, *sizes[-2:])
            latent["noise_mask"][..., : sizes[-1] // 3] = 0
        return io.NodeOutput(latent)


class Wait(io.ComfyNode):
    """Conditioning that takes as long as a real text encoder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestWait",
            category=CATEGORY,
            is_dev_only=True,
            inputs=[io.Conditioning.Input("conditioning"), io.Float.Input("seconds")],
            outputs=[io.Conditioning.Output()],
        )

    @classmethod
    def execute(cls, conditioning: list[list[Any]], seconds: float) -> io.NodeOutput:
        time.sleep(seconds)
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
    def execute(cls, samples: dict[str, torch.Tensor], name: str) -> io.NodeOutput:
        path = Path(folder_paths.get_output_directory()) / f"{name}.safetensors"
        safetensors.torch.save_file({"samples": samples["samples"].contiguous().cpu()}, path)
        return io.NodeOutput(ui={"cp_test": [{"path": str(path), "keys": sorted(samples)}]})


def _conditioning(spec: dict[str, Any], dice: torch.Generator) -> list[list[Any]]:
    text = torch.randn(1, spec["tokens"], spec["dim"], generator=dice)
    options: dict[str, Any] = {}
    if "pooled" in spec:
        options["pooled_output"] = torch.randn(1, spec["pooled"], generator=dice)
    if "guidance" in spec:
        options["guidance"] = float(spec["guidance"])
    if "mask_valid" in spec:
        options["attention_mask"] = (torch.arange(spec["tokens"]) < spec["mask_valid"]).long()[None]
    return [[text, options]]
