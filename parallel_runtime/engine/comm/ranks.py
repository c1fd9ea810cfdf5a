"""This rank, its machine and its device."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from ...accelerators import KERNELS, distributed_backends, version_of
from ...loading.random_states import generator_kind
from .rendezvous import store_at

# The host watches for stalls and ends the whole group; a collective that timed out alone would only blur the cause.
COLLECTIVE_TIMEOUT = timedelta(hours=24)
ONE_CARD = "CP_NCCL_ON_ONE_CARD"


def rank() -> int:
    return int(os.environ["RANK"])


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def machine() -> int:
    """Returns the number of this rank's machine: 0 is ComfyUI's."""
    return int(os.environ["GROUP_RANK"])


def machine_count() -> int:
    return int(os.environ["GROUP_WORLD_SIZE"])


def machine_ranks() -> range:
    each = world_size() // machine_count()
    return range(machine() * each, (machine() + 1) * each)


def join(device: torch.device, store: str, *, through_main_memory: bool) -> None:
    """Initialises the process group: with the device's own backend, or with gloo `through_main_memory`, as where ranks
    share a device.

    `store` is a place of rendezvous.py. With ONE_CARD set ranks that share a GPU use NCCL all the same, through
    sockets: to try NCCL's code where there is one GPU.
    """
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    if world_size() == 1:
        return
    if through_main_memory and device.type == "cuda" and os.environ.get(ONE_CARD):
        # NCCL refuses two ranks of one host on one GPU: each is a host of its own.
        os.environ |= {"NCCL_HOSTID": f"rank{rank()}", "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}
        os.environ["NCCL_SOCKET_IFNAME"] = "=lo"
        through_main_memory = False
    backend = "cpu:gloo" if through_main_memory else distributed_backends(device.type)
    dist.init_process_group(
        backend,
        store=store_at(store, "ranks"),
        rank=rank(),
        world_size=world_size(),
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if device.type in backend and device.type != "cpu" else None,
    )


def device_kind(device: torch.device) -> str:
    """Identifies devices that draw the same random numbers, round alike and have the same kernels: their generators,
    the version of cuDNN and the installed packages of attention kernels, with their versions."""
    if device.type == "cpu":
        return device.type
    packages = {kernel.package for kernel in KERNELS.values() if kernel.package and kernel.installed}
    versions = {f"{package} {version_of(package) or ''}".strip() for package in packages}
    return " ".join(map(str, (generator_kind(device), torch.backends.cudnn.version(), *sorted(versions))))
