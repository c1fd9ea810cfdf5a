"""Checks what arrives from other ranks, and measures how fast this one computes and sends blocks: once, in a fraction
of a second, when the group starts."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...engine.comm.collectives import all_to_all, ring_send_recv
from ...engine.comm.mesh import GroupState, MeshDim, comm_device_of, mesh_dim_of
from ...engine.comm.ranks import world_size
from ...errors import ParallelError, say

REPEATS = 3
CHECKED_NUMBERS = 1 << 18  # of each rank: 1 MiB, which NCCL sends as it sends large tensors
HEAD_SIZE = 128


def check_links(device: torch.device) -> None:
    """Compares what arrives from the previous rank of a ring, and from all ranks in an all-to-all, with what they sent:
    a broken P2P would make wrong pictures without a word. Collective. Raises ParallelError."""
    if world_size() == 1:
        return
    assert dist.group.WORLD is not None
    world = mesh_dim_of(dist.group.WORLD, comm_device_of(device), GroupState())
    sent = torch.arange(CHECKED_NUMBERS * world.size, dtype=torch.int32, device=device)
    part = sent[world.index * CHECKED_NUMBERS :][:CHECKED_NUMBERS]

    def expected(rank: int) -> Tensor:
        return part + 7919 * rank

    before = (world.index - 1) % world.size
    received = torch.zeros_like(sent)
    ring_send_recv(sent + 7919 * world.index, received, world).wait()
    wrong = [] if torch.equal(received, sent + 7919 * before) else [before]
    all_to_all(sent + 7919 * world.index, received, None, None, world).wait()
    wrong += [rank for rank, block in enumerate(received.chunk(world.size)) if not torch.equal(block, expected(rank))]
    if wrong:
        raise ParallelError(say("start.corrupt", ranks=", ".join(map(str, sorted({*wrong})))))


def flops_per_second(device: torch.device) -> float:
    """Measures one matrix product in the precision that models use on this device."""
    size, dtype = (384, torch.float32) if device.type == "cpu" else (4096, torch.bfloat16)
    a = torch.ones(size, size, device=device, dtype=dtype)
    return 2 * size**3 / _best(lambda: a @ a, device)


def attention_flops_per_second(device: torch.device) -> float:
    """Measures PyTorch's attention in the same precision; its ratio to the matrix product differs between cards."""
    heads, tokens, dtype = (4, 512, torch.float32) if device.type == "cpu" else (24, 4096, torch.bfloat16)
    q = torch.ones(1, heads, tokens, HEAD_SIZE, device=device, dtype=dtype)
    return 4 * heads * tokens**2 * HEAD_SIZE / _best(lambda: F.scaled_dot_product_attention(q, q, q), device)


def bytes_per_second(mesh_dim: MeshDim, device: torch.device) -> float:
    """Measures a send to the next rank while the previous one's block arrives. Collective."""
    size = (1 << 20) if device.type == "cpu" else (64 << 20)
    block = torch.ones(size, dtype=torch.uint8, device=device)
    received = torch.empty_like(block)
    dist.barrier()
    return size / _best(lambda: ring_send_recv(block, received, mesh_dim).wait(), device)


def host_bytes_per_second(device: torch.device) -> float:
    """Measures copies from main memory to the device, while all ranks that call this do the same."""
    cuda = device.type == "cuda"
    block = torch.ones((64 if cuda else 4) << 20, dtype=torch.uint8, pin_memory=cuda)
    target = torch.empty_like(block, device=device)
    return block.nbytes / _best(lambda: target.copy_(block, non_blocking=True), device)


def _best(run: Callable[[], Tensor | list[Tensor]], device: torch.device) -> float:
    """Returns the seconds of the fastest of REPEATS runs, after one to warm up."""
    times = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - started)
    return max(min(times[1:]), 1e-9)
