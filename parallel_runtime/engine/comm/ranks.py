"""This rank, its machine and its device; and the rendezvous through a store that the host has made: first of the
torchruns, whose node ranks are fixed, then of ranks.

torchrun's own rendezvous of several machines unpickles whatever lies in its store.
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from ...accelerators import KERNELS, distributed_backends, version_of
from ...loading.random_states import generator_kind

RENDEZVOUS = "cp-store"  # as in group/torchrun.py


def store_at(place: str, prefix: str) -> Store:
    """Returns the store at `place`: a private file on one machine, so that no port is opened; host:port on several
    machines. `prefix` is that of the keys."""
    if os.path.isabs(place):
        return PrefixStore(prefix, FileStore(place))
    host, _, port = place.rpartition(":")
    return PrefixStore(prefix, TCPStore(host, int(port), is_master=False))


class StoreRendezvous(StaticTCPRendezvous):
    """torchrun's static rendezvous of machines with fixed node ranks, in a store that is already open."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        super().__init__("", 0, int(parameters.config["machine"]), parameters.max_nodes, parameters.run_id, timeout=0)
        self._place = parameters.endpoint

    def get_backend(self) -> str:
        return RENDEZVOUS

    def next_rendezvous(self) -> RendezvousInfo:
        unused = RendezvousStoreInfo("", 0)  # only for ranks that read torchrun's variables
        return RendezvousInfo(store_at(self._place, "machines"), self.rank, self.world_size, unused)


def register_rendezvous() -> None:
    """Registers the rendezvous with torchrun under NAME."""
    rendezvous_handler_registry.register(RENDEZVOUS, StoreRendezvous)


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

    `store` is a place for `store_at`. With ONE_CARD set ranks that share a GPU use NCCL all the same, through
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
