"""What each rank does in the tests of weights that are not at rest on its device, in ComfyUI's python."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from parallel_runtime.architectures.network_modules import blocks_of, large_layers, weight_bytes
from parallel_runtime.engine.comm.mesh import with_new_group
from parallel_runtime.engine.parallelize import parallelize, unparallelize
from parallel_runtime.engine.prefetch import (
    BlockPrefetcher,
    Buffers,
    FetchedModule,
    Wait,
    WeightSource,
    offloaded_blocks,
)
from parallel_runtime.engine.weight_sources import HostWeights, ShardedWeights

from ..engine.meshes import mesh, parallelism
from ..peak_memory import peak_bytes
from .cases import error, forward, made, plan_of

CPU = torch.device("cpu")


class PoisonedBuffers(Buffers):
    """Sets all bits of what has been used, which is no number in any floating-point format."""

    def poison(self, entry: FetchedModule, *_: Any) -> None:
        if self._contents.get(entry.buffer) is entry:
            del self._contents[entry.buffer]
            self.view(entry.buffer, entry.flat_block.padded_bytes).fill_(0xFF)


def parity(
    rank: int,
    world: int,
    name: str,
    mode: str,
    ring: int = 1,
    ulysses: int = 1,
    residents: Sequence[int] = (0,),
    parts: Sequence[int] = (),
) -> dict[str, Any]:
    """Are two evaluations equal, to the bit, to those with whole weights? And what was fetched and held. `residents`
    are the blocks that each rank keeps, or all of them alike; `parts` those of a shard."""
    network, inputs = made(name)
    parallelize(network, plan_of(network).plan, mesh(ring, ulysses), parallelism(ring, ulysses))
    try:
        want = forward(network, inputs)
        total = weight_bytes(network)
        with torch.inference_mode():
            source = source_of(mode, rank, world, ring, ulysses, parts)
            fetches = counted_fetches(source)
            store = stored(network, source, residents, rank)
            got = [forward(network, inputs)]
            first = len(fetches)
            got.append(forward(network, inputs))
            answer = {"fetches": len(fetches), "held": 1 - store.nonresident_bytes / total}
            answer |= {"modules": len(store.offloaded), "later fetches": len(fetches) - first}
            store.close()
    finally:
        unparallelize(network)
    return answer | {"equal": all(torch.equal(a, b) for out in got for a, b in zip(out, want, strict=True))}


def peak(rank: int, world: int, name: str, mode: str) -> dict[str, float]:
    """The most that was allocated from a network in a file to its first block, beside the bound for it, in bytes."""
    network, _ = made(name)
    in_the_file = [parameter.data for parameter in network.parameters()]
    blocks = blocks_of(network, plan_of(network).plan)
    block, weight = max(map(weight_bytes, blocks)), max(tensor.nbytes for tensor in in_the_file)
    source, kept = source_of(mode, rank, world, world, 1), []
    with torch.inference_mode():
        most = peak_bytes(lambda: kept.append(stored(network, source)))
    share = kept[0].source.device_bytes
    kept[0].close()
    return {"peak": most, "bound": share + 2 * block + weight, "share": share / sum(t.nbytes for t in in_the_file)}


def judged(rank: int, world: int, name: str) -> float:
    """How far from a network that FSDP2 keeps in parts."""
    network, inputs = made(name)
    parallelize(network, plan_of(network).plan, mesh(world, 1), parallelism(world, 1))
    with torch.inference_mode():
        store = stored(network, source_of("shard", rank, world, world, 1))
        ours = forward(network, inputs)
        store.close()
    judge, inputs = made(name)
    parallelize(judge, plan_of(judge).plan, mesh(world, 1), parallelism(world, 1))
    blocks, flat = blocks_of(judge, plan_of(judge).plan), mesh(world, 1).device_mesh
    for block in blocks:
        fully_shard(block, mesh=flat, reshard_after_forward=True)
    inside = {parameter for block in blocks for parameter in block.parameters()}
    fully_shard(judge, mesh=flat, ignored_params=set(judge.parameters()) - inside)
    assert any(isinstance(parameter, DTensor) for parameter in blocks[0].parameters())
    return error(ours, forward(judge, inputs))


def source_of(mode: str, rank: int, world: int, ring: int, ulysses: int, parts: Sequence[int] = ()) -> WeightSource:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), GROUP_RANK="0", GROUP_WORLD_SIZE="1")
    if mode == "shard":
        return ShardedWeights(replace(with_new_group(mesh(ring, ulysses).context, CPU), shares=tuple(parts)))
    return HostWeights(CPU, range(world), rank, staged=mode == "staged")


def counted_fetches(source: WeightSource) -> list[Tensor]:
    """The parts that `source` has fetched, from now on."""
    fetch, parts = source.fetch, list[Tensor]()

    def counting(part: Tensor, memory: Tensor) -> Wait:
        parts.append(part)
        return fetch(part, memory)

    source.fetch = counting  # type: ignore[method-assign]
    return parts


def stored(network: nn.Module, source: WeightSource, residents: Sequence[int] = (0,), rank: int = 0) -> BlockPrefetcher:
    blocks = blocks_of(network, plan_of(network).plan)
    buffers = PoisonedBuffers(CPU)
    store, resident = BlockPrefetcher(network, source, buffers), residents[rank % len(residents)]
    fetched = offloaded_blocks(blocks, resident, residents)
    for block in offloaded_blocks(blocks, min(residents), residents):
        store.add(block, resident=block not in fetched)
    for layer in large_layers(network, blocks):
        store.add(layer, block=False)
    store.seal()
    for entry in store.offloaded:
        entry.module.register_forward_hook(partial(buffers.poison, entry))
    return store
