"""How much memory there is for the next tensors, of a device and of its machine. Knows no models."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch


def host_free_bytes() -> int:
    """Main memory that could be taken without swapping."""
    told = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(told["MemAvailable"].split()[0]) << 10


def free_bytes(device: torch.device) -> int:
    if device.type != "cpu":
        return torch.accelerator.get_memory_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def spare_bytes(device: torch.device) -> int:
    """What PyTorch keeps of a device for this process's next tensors."""
    if device.type == "cpu":
        return 0
    return torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)


def give_back_cache(device: torch.device) -> None:
    """Memory that PyTorch or the C library keeps for later looks taken to other processes, as ComfyUI's."""
    if device.type != "cpu":
        torch.accelerator.empty_cache()
    elif trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc has it
        trim(0)
