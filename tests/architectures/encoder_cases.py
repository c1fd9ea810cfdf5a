"""What each rank does in the tests of text encoders in stages, or with blocks that are fetched, in ComfyUI's python."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from parallel_runtime.architectures.network_modules import encoder_units, weight_bytes
from parallel_runtime.engine.comm.mesh import MeshDim
from parallel_runtime.engine.prefetch import BlockPrefetcher
from parallel_runtime.engine.stages import OwnedModules, RemoteModule
from parallel_runtime.engine.weight_sources import HostWeights
from parallel_runtime.errors import Refused

from ..zoo.encoder_classes import ENCODERS
from ..zoo.tiny import normal, seed
from .weight_cases import CPU, PoisonedBuffers

importlib.import_module("comfy.sd1_clip")  # takes long, and no case is to wait for it
importlib.import_module("comfy.text_encoders.t5")  # ComfyUI's ByT5 uses it as if somebody had imported it

FULL_SIZE = {"clip_l": {}, "t5base": {}}
NAMES = ("tiny", "clip_g", "t5xxl", "mt5xl", "hydit_clip", "llama")  # by which classes look for a config


def made(name: str, smaller: dict[str, Any] | None = None) -> Any:
    """The same encoder on every rank, with weights of a seed."""
    path, tiny = ENCODERS[name]
    module, _, kind = path.rpartition(".")
    config = tiny if smaller is None else smaller
    options = {"model_name": "tiny"} | {f"{one}_model_config": config for one in NAMES} if config else {}
    seed(5)
    encoder = getattr(importlib.import_module(f"comfy.{module}"), kind)(
        device="cpu", dtype=torch.float32, model_options=options
    )
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.copy_(normal(*weight.shape) * (0.1 if weight.ndim > 1 else 0.02) + (weight.ndim == 1))
    if isinstance(encoder.layer, list):  # of more layers than there are
        encoder.options_default = ([1, 3, 5], *encoder.options_default[1:])
    return encoder


def encoded(encoder: Any, layer: Any = None) -> list[Any]:
    """What it makes of two prompts of unlike length."""
    encoder.reset_clip_options()
    encoder.execution_device = CPU
    if layer is not None:
        encoder.layer, encoder.layer_idx = ("hidden", layer) if isinstance(layer, int) else (layer, None)
    last = encoder.special_tokens.get("end", 7)
    prompts = [[5, 77, 12, 30, 41, last, *[3] * 71], [9, 8, *[6] * 74, last]]  # as long as CLIP takes them
    with torch.inference_mode():
        return tree_leaves(encoder.encode(prompts))


def in_stages(
    rank: int, world: int, name: str, stages: list[int], layers: list[Any] | None = None, full_size: bool = False
) -> dict[str, Any]:
    """Is it equal to the bit, after each of these `layers`, with weights of other ranks that are no numbers? And the
    share of the weights that this rank has."""
    encoder = made(name, FULL_SIZE[name] if full_size else None)
    layers = layers or [None]
    want, total = [encoded(encoder, layer) for layer in layers], weight_bytes(encoder)
    own(encoder, rank, world, stages)
    got = [encoded(encoder, layer) for layer in layers]
    return {"equal": all(map(equal, got, want)), "held": weight_bytes(encoder) / total}


def own(encoder: Any, rank: int, world: int, stages: list[int]) -> OwnedModules:
    units = [unit for kind in encoder_units(encoder) for unit in kind]
    each = [*stages, len(units) - sum(stages)]
    owners = [stage for stage, count in enumerate(each) for _ in range(count)]
    owned = OwnedModules(encoder, units, owners, rank)
    owned.dim = MeshDim(size=world, index=rank, ranks=tuple(range(world)))
    for module in encoder.modules():
        if isinstance(module, RemoteModule):
            for weight in module.block.parameters():
                weight.data.fill_(torch.nan)
    return owned


def equal(got: list[Any], want: list[Any]) -> bool:
    each = zip(got, want, strict=True)
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in each)


def failing(rank: int, world: int) -> dict[str, Any]:
    """A block that raises on its rank, and then none."""
    encoder = made("qwen3")
    owned = own(encoder, rank, world, [3])
    block = encoder.transformer.model.layers[4]
    if rank == world - 1:
        working: Callable[..., Any] = block.forward
        block.forward = partial(owned._compute, lambda *_, **__: {}["missing"])
    refused = ""
    try:
        encoded(encoder)
    except Refused as error:
        refused = str(error)
    if rank == world - 1:
        block.forward = working
    return {"refused": refused, "finite": all(bool(x.isfinite().all()) for x in encoded(encoder) if x is not None)}


def fetched(rank: int, world: int, name: str, resident: int) -> dict[str, Any]:
    """On one rank, while the others do nothing: equal to the bit, twice, with buffers that are poisoned after use?"""
    if rank:
        return {"equal": True}
    encoder = made(name)
    want = encoded(encoder)
    layers, blocks = encoder_units(encoder)
    buffers = PoisonedBuffers(CPU)
    store = BlockPrefetcher(encoder, HostWeights(CPU, [0], 0, staged=True, dim=MeshDim()), buffers)
    for block in blocks[resident:]:
        store.add(block)
    for layer in layers if not resident else []:
        store.add(layer, block=False)
    store.seal()
    for entry in store.offloaded:
        entry.module.register_forward_hook(partial(buffers.poison, entry))
    got = []
    for _ in range(2):
        store.begin()
        got.append(encoded(encoder))
        buffers.discard_fetched()
        buffers.free()
    store.close()
    return {"equal": all(equal(one, want) for one in got)}
