"""ControlNets as the host describes them, and as a worker computes them, without a run."""

from __future__ import annotations

import os
from typing import Any

import safetensors.torch
import torch
from torch import nn

from .pack import node_module, pack_module

import comfy.controlnet  # isort: skip  # the pack's module has made ComfyUI importable

describe, errors = node_module("describe.describer"), pack_module("parallel_runtime.errors")
files = node_module("describe.model_files")
control_division = pack_module("parallel_runtime.worker.comfy_loop.control_division")
mesh = pack_module("parallel_runtime.engine.comm.mesh")


class Network(nn.Module):
    """What a ControlNet calls; keeps what it was given."""

    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.seen: list[dict[str, Any]] = []

    def forward(self, **given: Any) -> dict[str, list[torch.Tensor]]:
        self.seen.append(given)
        return {"output": [given["x"] * 2]}


def rows_that_its_network_has(rank: int, world: int, batch: int, index: int) -> list[list[int]]:
    """The rows of a batch that the network of the second in a chain is given in batch group `index` of two: within a
    run's context, and after it; and the rows of the hint and of a list that is of no rows."""
    first, second = (comfy.controlnet.ControlNet(Network(), load_device="cpu") for _ in range(2))
    second.previous_controlnet, network = first, second.control_model
    controls = control_division.of_conds({"positive": [{"control": second}], "negative": [{"control": second}]})
    given = {"x": torch.arange(batch), "hint": torch.arange(1), "control_type": [3], "y": torch.arange(batch)}
    with control_division.own_entries(controls, mesh.MeshDim(size=2, index=index)):
        network(**given)
        first.control_model(**given)
    network(**given)
    inside, after = network.seen
    assert first.control_model.seen[0]["x"].tolist() == inside["x"].tolist() == inside["y"].tolist()
    return [inside["x"].tolist(), after["x"].tolist(), inside["hint"].tolist(), inside["control_type"]]


def files_of_a_control_lora(rank: int, world: int, folder: str) -> list[str]:
    """The files of two copies of a Control-LoRA of ComfyUI's loader; and why one of the same weights has none."""
    weights = {"a.up": torch.rand(4, 3), "a.down": torch.rand(3, 4), "lora_controlnet": torch.zeros(1)}
    safetensors.torch.save_file(weights, path := os.path.join(folder, "control_lora.safetensors"))
    files.note_files()
    read, made = comfy.controlnet.load_controlnet(path), comfy.controlnet.ControlLora(weights)
    answers = []
    for loaded in read, read, made:
        used = loaded.copy().set_cond_hint(torch.rand(1, 3, 8, 8))
        try:
            answers.append(describe.describer((1, 4, 1, 1)).describe(used, "the ControlNet")["file"]["path"])
        except errors.Refused as refused:
            answers.append(str(refused))
    return answers


def _of_a_pack(*_: Any) -> None:
    """A pack's own, in place of a method."""


def refusal_of_one(rank: int, world: int, what: str) -> str:
    """Why one that is `patched` itself, with a method `replaced`, or of no `file` stays in ComfyUI's process."""
    control = comfy.controlnet.ControlNet(comfy.ops.disable_weight_init.Linear(3, 3), load_device="cpu")
    control.set_cond_hint(torch.rand(1, 3, 8, 8))
    if what == "replaced":
        vars(control)["get_control"] = _of_a_pack
    if what == "patched":
        control.control_model_wrapped.add_patches({"weight": (torch.ones(3, 3),)})
    try:
        describe.describer((1, 4, 1, 1)).describe({"control": control}, "the CONDITIONING")
    except errors.Refused as refused:
        return str(refused)
    return ""
