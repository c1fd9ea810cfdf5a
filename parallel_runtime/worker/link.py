"""How fast this rank computes and passes blocks on: measured once, in a fraction of a second, when the group forms."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .engine.exchange import hop
from .engine.mesh import Axis

REPEATS = 3
HEAD_SIZE = 128


def flops_per_second(device: torch.device) -> float:
    """Of one matrix product in the precision that models run in on this device."""
    size, dtype = (384, torch.float32) if device.type == "cpu" else (4096, torch.bfloat16)
    a = torch.ones(size, size, device=device, dtype=dtype)
    return 2 * size**3 / _best(lambda: a @ a, device)


def attention_flops_per_second(device: torch.device) -> float:
    """Of one attention, in the same precision, as PyTorch computes it: cards differ in both, and not alike."""
    heads, tokens, dtype = (4, 512, torch.float32) if device.type == "cpu" else (24, 4096, torch.bfloat16)
    q = torch.ones(1, heads, tokens, HEAD_SIZE, device=device, dtype=dtype)
    return 4 * heads * tokens**2 * HEAD_SIZE / _best(lambda: F.scaled_dot_product_attention(q, q, q), device)


def bytes_per_second(world: Axis, device: torch.device) -> float:
    """From this rank to the next while the previous one's block arrives. Every rank must call it together."""
    size = (1 << 20) if device.type == "cpu" else (64 << 20)
    block = torch.ones(size, dtype=torch.uint8, device=device)
    spare = torch.empty_like(block)
    dist.barrier()
    return size / _best(lambda: hop(block, spare, world).wait(), device)


def host_bytes_per_second(device: torch.device) -> float:
    """From main memory to the device, while every rank that calls this together does the same."""
    cuda = device.type == "cuda"
    block = torch.ones((64 if cuda else 4) << 20, dtype=torch.uint8, pin_memory=cuda)
    place = torch.empty_like(block, device=device)
    return block.nbytes / _best(lambda: place.copy_(block, non_blocking=True), device)


def _best(run: Callable[[], Tensor | list[Tensor]], device: torch.device) -> float:
    """Seconds of the fastest of some runs, after one that warms up."""
    times = []
    for _ in range(1 + REPEATS):
        started = time.perf_counter()
        run()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - started)
    return max(min(times[1:]), 1e-9)
