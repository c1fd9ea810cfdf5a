"""ControlNets as the host describes them, and as a worker computes them, without a run."""

from __future__ import annotations

import os
from typing import Any

import safetensors.torch
import torch
from torch import nn

from .pack import node_module, pack_module

import comfy.controlnet  # isort: skip  # the pack's module has made ComfyUI importable
import folder_paths  # isort: skip

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


def searches_for_a_control_lora(rank: int, world: int, folder: str) -> int:
    """How often the folder is searched for the file of a Control-LoRA that two runs use, each as a copy of its own."""
    weights = {"a.up": torch.rand(4, 3), "a.down": torch.rand(3, 4)}
    safetensors.torch.save_file(weights, os.path.join(folder, "control_lora.safetensors"))
    folder_paths.add_model_folder_path("controlnet", folder)
    loaded, find_file, searched = comfy.controlnet.ControlLora(weights), files.find_file, []
    files.find_file = lambda *of: searched.append(of) or find_file(*of)
    try:
        for _ in range(2):
            used = loaded.copy().set_cond_hint(torch.rand(1, 3, 8, 8))
            described = describe.describer((1, 4, 1, 1)).describe(used, "the ControlNet")
            assert described["file"]["path"].endswith("control_lora.safetensors")
    finally:
        files.find_file = find_file
    return len(searched)


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
