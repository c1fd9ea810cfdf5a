"""Devices as a user writes them."""

from __future__ import annotations

import os
import sys

from ..accelerators import CUDA
from ..errors import Refused

MAX_DEVICES = 64
MAX_DIGITS = 4  # of a GPU's number


def parse_devices(text: str, gpus: int, kind: str = CUDA.kind) -> tuple[str, ...]:
    """The devices that `text` lists, every GPU where it is empty, and () for "the CPU, as often as needed"."""
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    if not names:
        return tuple(f"{kind}:{index}" for index in range(gpus))
    if len(names) > MAX_DEVICES:
        raise Refused(f"devices: {len(names)} are listed, and {MAX_DEVICES} workers a machine are the most; name fewer")
    devices = tuple(_device(name, gpus, kind) for name in names)
    if "cpu" in devices and len({device == "cpu" for device in devices}) > 1:
        raise Refused(f"devices: {text!r} mixes CPU and GPUs, which cannot share one picture; name one kind")
    return devices


def why_one_gpu(gpus: int) -> str:
    """Why there is one alone, where the environment may hide others. On Windows main.py sees to that by itself."""
    asked = any(argument.startswith("--cuda-device") for argument in sys.argv)
    if gpus != 1 or asked or os.environ.get("CUDA_VISIBLE_DEVICES") != "0":
        return ""
    return (
        "CUDA_VISIBLE_DEVICES is 0, which hides the other GPUs: start ComfyUI without it, or on Windows, where ComfyUI "
        "sets it by itself, with --cuda-device all"
    )


def _device(name: str, gpus: int, kind: str) -> str:
    if name == "cpu":
        return name
    index = name.removeprefix(f"{kind}:")
    if not index.isdecimal() or len(index) > MAX_DIGITS:
        raise Refused(
            f"devices: {name[:40]!r} is no device; write GPU numbers such as 0,1 or {kind}:0,{kind}:1, or cpu"
        )
    if int(index) >= gpus:
        there = f"GPUs 0 to {gpus - 1}" if gpus else f"no {kind.upper()} GPU that ComfyUI uses"
        way_out = why_one_gpu(gpus) or "leave devices empty to use what there is"
        raise Refused(f"devices: there is no GPU {index} here ({there}); {way_out}")
    return f"{kind}:{int(index)}"
