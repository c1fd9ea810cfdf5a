"""Devices as a user writes them."""

from __future__ import annotations

import os
import sys

from ..accelerators import CUDA
from ..errors import Refused, quoted, say

MAX_DEVICES = 64
MAX_DIGITS = 4  # of a GPU's number
MAX_CPU_WORKERS = max(8, os.cpu_count() or 1)


def parse_devices(text: str, gpus: int, kind: str = CUDA.kind) -> tuple[str, ...]:
    """Returns the devices that `text` lists, every GPU where it is empty, and () for "the CPU, as often as needed"."""
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    if not names:
        return tuple(f"{kind}:{index}" for index in range(gpus))
    if len(names) > MAX_DEVICES:
        raise Refused("devices.many", widget="devices", count=len(names), most=MAX_DEVICES)
    devices = tuple(_device(name, gpus, kind) for name in names)
    if "cpu" in devices and len({device == "cpu" for device in devices}) > 1:
        raise Refused("devices.mixed", widget="devices", devices=quoted(text))
    return devices


def why_one_gpu(gpus: int) -> str:
    """Returns why there is one GPU alone, where the environment may hide others; "" where it does not."""
    chosen = any(argument.startswith("--cuda-device") for argument in sys.argv)
    if gpus != 1 or chosen or os.environ.get("CUDA_VISIBLE_DEVICES") != "0":
        return ""
    return say("gpus.hidden")


def _device(name: str, gpus: int, kind: str) -> str:
    if name == "cpu":
        return name
    index = name.removeprefix(f"{kind}:")
    if not index.isdecimal() or len(index) > MAX_DIGITS:
        raise Refused("devices.unknown", widget="devices", device=quoted(name), kind=kind)
    if int(index) >= gpus:
        known = say("gpus.known", last=gpus - 1) if gpus else say("gpus.none", kind=kind.upper())
        out = why_one_gpu(gpus) or say("devices.empty" if gpus else "devices.trial")
        raise Refused("devices.missing", "devices", index=index, known=known, out=out)
    return f"{kind}:{int(index)}"
