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
        raise Refused("devices.many", "devices", {"devices": ""}, count=len(names), most=MAX_DEVICES)
    trial = "" if gpus else ",".join(["cpu"] * min(max(2, len(names)), MAX_CPU_WORKERS))
    devices = tuple(_device(name, gpus, kind, trial) for name in names)
    if "cpu" in devices and len({device == "cpu" for device in devices}) > 1:
        known = ",".join(device for device in devices if device != "cpu")
        raise Refused("devices.mixed", "devices", {"devices": known}, devices=quoted(text), known=known)
    return devices


def why_one_gpu(gpus: int) -> str:
    """Returns why there is only one GPU, where the environment may hide others; "" where it does not."""
    chosen = any(argument.startswith("--cuda-device") for argument in sys.argv)
    if gpus != 1 or chosen or os.environ.get("CUDA_VISIBLE_DEVICES") != "0":
        return ""
    return say("gpus.hidden")


def _device(name: str, gpus: int, kind: str, trial: str) -> str:
    """Returns the device of this name. Raises Refused: `trial` are CPU workers in place of all that were named, where
    there is no GPU."""
    if name == "cpu":
        return name
    fix = {"devices": trial}
    index = name.removeprefix(f"{kind}:")
    if not index.isdecimal() or len(index) > MAX_DIGITS:
        out = say("devices.trial", trial=trial) if trial else say("devices.empty")
        raise Refused("devices.unknown", "devices", fix, device=quoted(name), kind=kind, out=out)
    if int(index) >= gpus:
        if not gpus:
            raise Refused("devices.missing.all", "devices", fix, index=index, kind=kind.upper(), trial=trial)
        reason = say("devices.missing", index=index, last=gpus - 1)
        if why := why_one_gpu(gpus):
            reason = say("reason.why", reason=reason, why=why)
        raise Refused(reason.key, "devices", fix, **reason.values)
    return f"{kind}:{int(index)}"
