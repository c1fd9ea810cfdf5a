"""This rank, its machine and its device: where ranks meet, the device's events, each completed when all work launched
before it has ended, and free memory, the device's and the machine's.

Ranks meet through a store that the host has made: first the torchruns, whose node ranks are fixed, then the ranks.
torchrun's own rendezvous of several machines unpickles whatever lies in its store."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from ...accelerators import KERNELS, distributed_backends, version_of
from ...architectures.network_modules import outermost_blocks
from ...loading.random_states import generator_kind

RENDEZVOUS = "cp-store"  # as in group/torchrun.py


def store_at(place: str, prefix: str) -> Store:
    """Returns the store at `place`, a file, or host:port on several machines. `prefix` is that of the keys."""
    # A private file, so that one machine opens no port.
    if os.path.isabs(place):
        return PrefixStore(prefix, FileStore(place))
    host, _, port = place.rpartition(":")
    return PrefixStore(prefix, TCPStore(host, int(port), is_master=False))


class StoreRendezvous(StaticTCPRendezvous):
    """torchrun's static rendezvous of machines with fixed node ranks, in a store that is already open."""

    def __init__(self, parameters: rendezvous.RendezvousParameters) -> None:
        super().__init__("", 0, int(parameters.config["machine"]), parameters.max_nodes, parameters.run_id, timeout=0)
        self._place = parameters.endpoint

    def get_backend(self) -> str:
        return RENDEZVOUS

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        unused = rendezvous.RendezvousStoreInfo("", 0)  # only for ranks that read torchrun's variables
        return rendezvous.RendezvousInfo(store_at(self._place, "machines"), self.rank, self.world_size, unused)


def register_rendezvous() -> None:
    """Registers the rendezvous with torchrun under RENDEZVOUS."""
    rendezvous.rendezvous_handler_registry.register(RENDEZVOUS, StoreRendezvous)


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
    sockets: to try NCCL's code where there is one GPU."""
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
        backend, store=store_at(store, "ranks"), rank=rank(), world_size=world_size(), timeout=COLLECTIVE_TIMEOUT,
        device_id=device if device.type in backend and device.type != "cpu" else None,
    )  # fmt: skip


def device_kind(device: torch.device) -> str:
    """Identifies devices that draw the same random numbers, round alike and have the same kernels: their generators,
    the version of cuDNN and the installed packages of attention kernels, with their versions."""
    if device.type == "cpu":
        return device.type
    packages = {kernel.package for kernel in KERNELS.values() if kernel.package and kernel.installed}
    versions = {f"{package} {version_of(package) or ''}".strip() for package in packages}
    return " ".join(map(str, (generator_kind(device), torch.backends.cudnn.version(), *sorted(versions))))


POLL_SECONDS = 0.0005


class HostEvent:
    """An event of the CPU, with torch.Event's methods: completed at once, since the CPU computes as it is called."""

    def __init__(self) -> None:
        self.milliseconds = 1e3 * time.monotonic()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: HostEvent) -> float:
        return end.milliseconds - self.milliseconds


DeviceEvent = torch.Event | HostEvent
EventFactory = Callable[[], DeviceEvent]  # returns an event that is recorded already


def event_factory(device: torch.device) -> EventFactory:
    def record() -> torch.Event:
        event = torch.Event(device=device, enable_timing=True)
        event.record()
        return event

    return HostEvent if device.type == "cpu" else record


def seconds_between(begin: Any, end: Any) -> float:
    """Returns the device seconds between two completed events of one device."""
    return float(begin.elapsed_time(end)) / 1e3


class CommTimer:
    """Measures how long the device waits for transfers, from construction until `end`."""

    def __init__(self, make_event: EventFactory) -> None:
        self._make_event = make_event
        self._start = make_event()
        self._end: DeviceEvent | None = None
        self._waits: list[tuple[DeviceEvent, DeviceEvent]] = []

    def time_wait(self, wait: Callable[[], None]) -> None:
        """Runs and times a transfer's `wait`; while a CUDA graph is captured it is not timed."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            wait()
            return
        before = self._make_event()
        wait()
        self._waits.append((before, self._make_event()))

    def end(self) -> None:
        self._end = self._make_event()

    @property
    def computed_seconds(self) -> float | None:
        """Returns the device seconds spent computing, without communication; None until its events are completed, and
        where no transfer was timed, as in a graph replay."""
        if self._end is None or not self._waits or not self._end.query():
            return None
        return seconds_between(self._start, self._end) - sum(seconds_between(*wait) for wait in self._waits)


class LaunchThrottle:
    """Keeps the host one evaluation ahead of its device at most: progress is right then, and a cancel quick."""

    def __init__(self, make_event: EventFactory) -> None:
        self._make_event = make_event
        self._start: DeviceEvent | None = None

    def wait_for_turn(self, on_poll: Callable[[], None]) -> None:
        """Waits until the evaluation before the last has ended, and calls `on_poll` every POLL_SECONDS until then."""
        event = self._make_event()
        while self._start is not None and not self._start.query():
            on_poll()
            time.sleep(POLL_SECONDS)
        self._start = event


NOTED_BLOCKS = 16  # of an evaluation: each is a small copy, and even slow devices end one within the stall limit


class BlockCounter:
    """Counts blocks of a network as the device computes them, whatever the host waits for meanwhile: an evaluation may
    take minutes, and only this tells it from one that hangs.

    The device itself copies its count to main memory. To ask its driver would have to wait while another thread's call
    does, such as one that pins memory and returns when all work launched before it has ended."""

    def __init__(self, device: torch.device) -> None:
        self._computed = torch.zeros(1, dtype=torch.int64, device=device)
        self._arrived = self._computed if device.type == "cpu" else torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._seen = 0

    def watch(self, network: nn.Module) -> None:
        """Counts blocks of every later forward, up to NOTED_BLOCKS in equal distances, or all."""
        blocks = list(outermost_blocks(network))
        for block in blocks[:: max(1, len(blocks) // NOTED_BLOCKS)]:
            block.register_forward_hook(self._count)

    def have_advanced(self) -> bool:
        """Returns whether the device has computed a block since the last call. May be called on another thread."""
        before, self._seen = self._seen, int(self._arrived[0])
        return self._seen != before

    def _count(self, *_: Any) -> None:
        # A copy inside a compiled or captured forward would become a part of it.
        if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return
        self._computed.add_(1)
        if self._arrived is not self._computed:
            self._arrived.copy_(self._computed, non_blocking=True)


CGROUP = Path("/sys/fs/cgroup")  # of this container, where it is one


def host_free_bytes() -> int:
    """Returns the bytes of main memory that are free without swapping, and below the limit of a container."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) << 10
    v2 = CGROUP, "memory.max", "memory.current"
    v1 = CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
    for folder, limit, used in (v2, v1):
        with suppress(OSError, ValueError):  # "max" is no number
            cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free = int((folder / limit).read_text()) - int((folder / used).read_text())
            return min(available, max(0, free + int(cached["inactive_file"])))
    return available


def free_bytes(device: torch.device) -> int:
    if device.type != "cpu":
        return torch.accelerator.get_memory_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cached_bytes(device: torch.device) -> int:
    """Returns the bytes that PyTorch's caching allocator has reserved on a device and not allocated to tensors."""
    if device.type == "cpu":
        return 0
    return torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)


def can_allocate(device: torch.device, nbytes: int, recorded_bytes: int) -> bool:
    """Can `nbytes` more be allocated? `recorded_bytes` belong to pools of CUDA graphs: PyTorch counts them
    as cached, but no other tensor can use them. The CPU has no such pools."""
    if device.type == "cpu":
        return True
    return free_bytes(device) + max(0, cached_bytes(device) - recorded_bytes) >= nbytes


def empty_cache(device: torch.device) -> None:
    """Returns memory cached by PyTorch or the C library to the system, for other processes such as ComfyUI."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()
    elif trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc has it
        trim(0)
