"""Checks weights offload where pages cannot be locked: a failed call of the CUDA runtime leaves its error behind, and a
run must be right all the same, if slower."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from parallel_runtime.engine.prefetch import Buffers
from parallel_runtime.engine.weight_sources import HostWeights

from ..bench.report.measuring import NEEDS_CUDA, Case, Measurement, Setting, clocked, mean_error
from ..bench.report.network_cases import prefetched

BLOCKS, WIDTH, BATCH = 8, 4096, 512


def cases(setting: Setting, device: torch.device) -> Iterator[Case]:
    if device.type != "cuda":
        yield Case({"what": "memory that cannot be page-locked"}, partial(dict, note=NEEDS_CUDA))
        return
    yield Case({"what": "the launch after a failed cudaHostRegister"}, partial(left_error, device))
    for what, locks in (("page-locked", True), ("memory that cannot be locked", False)):
        yield Case({"what": f"offload, {what}"}, partial(offloaded, device, locks=locks))


def left_error(device: torch.device) -> Measurement:
    """Does an unrelated launch raise the error that a failed call left behind?"""
    code = int(torch.cuda.cudart().cudaHostRegister(0, 4096, 0))
    assert code, "memory at no address was registered"
    try:
        torch.ones(1, device=device)
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        first, *_ = str(error).splitlines()
        return {"note": f"code {code}; raised by the next launch: {first}"}
    return {"note": f"code {code}; no launch raises it"}


@torch.no_grad()
def offloaded(device: torch.device, *, locks: bool, width: int = WIDTH) -> Measurement:
    """Returns error and time of blocks whose weights come from main memory, against the same blocks on the device."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    blocks = [nn.Linear(width, width, device=device, dtype=dtype) for _ in range(BLOCKS)]
    network, x = nn.Sequential(*blocks), torch.randn(BATCH, width, device=device, dtype=dtype)
    exact = network(x)
    source = HostWeights(device, [0], 0, staged=True)
    with nullcontext() if locks else nothing_locked(), prefetched(network, blocks, source, Buffers(device)):
        measurement = {"error": mean_error(network(x), exact)} | clocked(partial(network, x), device)
    torch.ones(1, device=device)
    return measurement


@contextmanager
def nothing_locked() -> Iterator[None]:
    """Makes each cudaHostRegister in this context fail in the CUDA runtime: it gets an address without memory."""
    runtime: Any = torch.cuda.cudart()
    register = runtime.cudaHostRegister
    runtime.cudaHostRegister = lambda address, size, flags: register(0, size, flags)
    try:
        yield
    finally:
        runtime.cudaHostRegister = register
