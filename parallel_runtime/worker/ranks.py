"""This rank, its device, and the one rule that keeps ranks together."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from ..accelerators import collectives_of
from ..errors import Refused
from .rendezvous import store_at

# The host watches for stalls and ends the whole group; a collective that timed out alone would only blur the cause.
COLLECTIVE_TIMEOUT = timedelta(hours=24)
ONE_CARD = "CP_NCCL_ON_ONE_CARD"


def another_host(rank: int) -> dict[str, str]:
    """NCCL refuses two ranks of one host on one GPU; each that says this passes for a host of its own."""
    return {"NCCL_HOSTID": f"rank{rank}", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "=lo"}


def rank() -> int:
    return int(os.environ["RANK"])


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def machine() -> int:
    """The number of this rank's machine: 0 is ComfyUI's."""
    return int(os.environ["GROUP_RANK"])


def machines() -> int:
    return int(os.environ["GROUP_WORLD_SIZE"])


def neighbours() -> range:
    """The ranks of this machine, this one among them."""
    each = world_size() // machines()
    return range(machine() * each, (machine() + 1) * each)


def join(device: torch.device, store: str, *, shared: bool) -> None:
    """Make this rank part of the group: by its device's own collectives, by gloo where ranks share a device.

    `store` is a place of rendezvous.py. With ONE_CARD set ranks that share a GPU use NCCL all the same, through
    sockets: to try NCCL's code where there is one GPU.
    """
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    if world_size() == 1:
        return
    if shared and device.type == "cuda" and os.environ.get(ONE_CARD):
        os.environ |= another_host(rank())
        shared = False
    backend = "cpu:gloo" if shared else collectives_of(device.type)
    dist.init_process_group(
        backend,
        store=store_at(store, "ranks"),
        rank=rank(),
        world_size=world_size(),
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if device.type in backend and device.type != "cpu" else None,
    )


def agree(flag: bool) -> bool:
    """True on every rank when it is true on any.

    A rank that leaves the loop, or skips blocks, alone leaves the others waiting in a collective for ever. So no
    rank may act on what only it has seen (a message, a threshold) before it has asked here.
    """
    if world_size() == 1:
        return flag
    votes = torch.tensor(int(flag))
    dist.all_reduce(votes, dist.ReduceOp.MAX)
    return bool(votes)


@contextmanager
def refusing_together(agree: Callable[[bool], bool] = agree) -> Iterator[None]:
    """What one rank refuses in here all refuse as they leave, so that none is waited for afterwards; all, or those that
    `agree` asks. Each of them has to come by, and none may refuse in here what others exchange with it. Collective."""
    refused: Refused | None = None
    try:
        yield
    except Refused as error:
        refused = error
    if agree(refused is not None):
        raise refused or Refused()


def everybodys(number: int) -> list[int]:
    """The number (of less than 63 bits) that each rank calls this with. Collective."""
    if world_size() == 1:
        return [number]
    numbers = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size())]
    dist.all_gather(numbers, torch.tensor([number]))
    return [int(each) for each in numbers]


def apart(said: bytes) -> list[int]:
    """The ranks that say something else than rank 0. Collective."""
    digests = everybodys(int.from_bytes(hashlib.sha256(said).digest()[:7], "big"))
    return [rank for rank, digest in enumerate(digests) if digest != digests[0]]


def kind_of(device: torch.device) -> str:
    """What decides which random numbers a device draws: on a GPU also how many processors it has."""
    if device.type == "cpu":
        return device.type
    properties = torch.get_device_module(device).get_device_properties(device)
    return f"{properties.name} {getattr(properties, 'multi_processor_count', '')}"
