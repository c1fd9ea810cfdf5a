"""Free memory of a device and of its machine. Knows no models."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")  # of this container, where it is one


def host_free_bytes() -> int:
    """Returns the bytes of main memory that can be allocated without swapping, or before a container's limit ends the
    process."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return min([int(meminfo["MemAvailable"].split()[0]) << 10, *_free_bytes_of_cgroup()])


def _free_bytes_of_cgroup() -> list[int]:
    """Returns the bytes below the limit of the cgroup (v2, else v1), those of cached files included; nothing without a
    limit."""
    for folder, limit, used in (
        (CGROUP, "memory.max", "memory.current"),
        (CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # "max" is no number
            cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            free = int((folder / limit).read_text()) - int((folder / used).read_text())
            return [max(0, free + int(cached["inactive_file"]))]
    return []


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
