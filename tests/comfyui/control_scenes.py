"""ControlNets as the host describes them, and as a worker computes them, without a run."""

from __future__ import annotations

import os
from typing import Any

import safetensors.torch
import torch
from torch import nn

from .pack import node_module, pack_module

import comfy.controlnet  # isort: skip  # the pack's module has made ComfyUI importable
from comfy.sd import VAE, load_vae_patcher  # isort: skip

from ..zoo import vaes  # isort: skip

describe, errors = node_module("describe.model_files"), pack_module("parallel_runtime.errors")
files = node_module("describe.model_files")
mesh = pack_module("parallel_runtime.engine.comm.mesh")
additional_models = pack_module("parallel_runtime.worker.comfy_loop.additional_models")
codec = pack_module("parallel_runtime.loading.object_codec")


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
    controls = codec.controls_of({"positive": [{"control": second}], "negative": [{"control": second}]})
    given = {"x": torch.arange(batch), "hint": torch.arange(1), "control_type": [3], "y": torch.arange(batch)}
    with additional_models.own_entries(controls, mesh.MeshDim(size=2, index=index)):
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
            answers.append(describe.describer().describe(used, "the ControlNet")["file"]["path"])
        except errors.Refused as refused:
            answers.append(str(refused))
    return answers


def _of_a_pack(*_: Any) -> None:
    """A pack's own, in place of a method."""


def tiny_vae() -> VAE:
    """One without a file."""
    network = vaes.random_weights(vaes.CASES["TAESD"].make())
    return VAE(sd={name: value.clone() for name, value in network.state_dict().items()})


class PacksVAE(VAE):
    """Of a pack's class."""


def _without_memory(*_: Any, **__: Any) -> torch.Tensor:
    raise torch.OutOfMemoryError


def encoded_in_a_worker(rank: int, world: int, file: str) -> list[Any]:
    """Of a VAE, from its `file` or without one, that two jobs describe: is it loaded once; are the latents of pictures
    ComfyUI's to the bit, also of ones that were encoded before and changed since; does it say that it lacks memory, and
    does ComfyUI know of that; and is it gone after both jobs?"""
    os.environ["WORLD_SIZE"] = str(world)
    native = tiny_vae()
    if file:
        network = vaes.random_weights(vaes.CASES["Wan 2.1, Qwen-Image"].make())
        safetensors.torch.save_file(vaes.weights_of(network), file)
        native = VAE(sd=safetensors.torch.load_file(file))
        native.patcher.cached_patcher_init = (load_vae_patcher, (file, None, None))
    models, made = additional_models.AdditionalModels(), []
    for _ in range(2):
        parts = describe.describer()
        tree = parts.describe({"vae": native}, "the CONDITIONING")
        assert parts.vaes == [native]
        with models.of_job("a network") as load:
            made.append(codec.Rebuilder(parts.tensors, load)(tree)["vae"])
    dice, equal = torch.Generator().manual_seed(3), []
    for pixels in (torch.rand(2, 45, 70, 3, generator=dice), torch.rand(1, 64, 48, 3, generator=dice)) * 2:
        latent = made[1].encode(pixels)
        equal.append(torch.equal(latent, native.encode(pixels)))
        latent.add_(1)
    made[1].first_stage_model.encode = _without_memory
    try:
        made[1].encode(torch.rand(1, 24, 24, 3))  # ComfyUI itself would go on with tiles
    except torch.OutOfMemoryError:
        equal.append(comfy.model_management.is_oom(torch.OutOfMemoryError()))
    loaded = models.unlisted("a network")
    models.drop("a network")
    return [made[0] is made[1], equal, loaded == [made[0].patcher], models.unlisted("a network")]


def refusal_of_a_vae(rank: int, world: int, what: str) -> str:
    """Why a VAE of a pack's class, or with `patches` on it, is not sent."""
    vae = tiny_vae()
    if what == "patches":
        name, weight = next(iter(vae.first_stage_model.named_parameters()))
        vae.patcher.add_patches({name: (torch.ones_like(weight),)})
    else:
        vae.__class__ = PacksVAE
    try:
        describe.describer().describe({"vae": vae}, "the CONDITIONING")
    except errors.Refused as refused:
        return str(refused)
    return ""


def refusal_of_one(rank: int, world: int, what: str) -> str:
    """Why one that is `patched` itself, with a method `replaced`, or of no `file` stays in ComfyUI's process."""
    control = comfy.controlnet.ControlNet(comfy.ops.disable_weight_init.Linear(3, 3), load_device="cpu")
    control.set_cond_hint(torch.rand(1, 3, 8, 8))
    if what == "replaced":
        vars(control)["get_control"] = _of_a_pack
    if what == "patched":
        control.control_model_wrapped.add_patches({"weight": (torch.ones(3, 3),)})
    try:
        describe.describer().describe({"control": control}, "the CONDITIONING")
    except errors.Refused as refused:
        return str(refused)
    return ""
