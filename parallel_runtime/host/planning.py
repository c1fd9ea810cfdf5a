"""From what the user asked for to degrees and devices, or to one sentence that says why not and what would work."""

from __future__ import annotations

import importlib.util
import os

from ..errors import Refused
from ..specs import AttentionBackend, Parallelism, ParallelRequest, Placement

MAX_CPU_WORKERS = max(8, os.cpu_count() or 1)
BACKEND_PACKAGES: dict[AttentionBackend, str] = {
    "flash": "flash_attn",
    "_flash_3": "flash_attn_interface",
    "sage": "sageattention",
}


def plan(request: ParallelRequest, *, heads: int, gpus: int) -> tuple[Parallelism, Placement]:
    """Degrees and devices for a model with `heads` attention heads on a host with `gpus` visible GPUs.

    Raises Refused where the request cannot work.
    """
    devices = parse_devices(request.devices, gpus)
    ring, ulysses = _degrees(request, len(devices), heads)
    limit = len(devices) if devices else MAX_CPU_WORKERS
    if ring * ulysses > limit or ulysses > heads:
        raise Refused(_too_much(ring, ulysses, devices, limit, heads))
    parallelism = Parallelism(
        ring_degree=ring,
        ulysses_degree=ulysses,
        rotate_method=request.rotate_method,
        convert_to_fp32=request.convert_to_fp32,
        attention_backend=request.attention_backend,
    )
    placement = Placement(devices=devices[: ring * ulysses] or ("cpu",) * (ring * ulysses))
    _check_backend(request.attention_backend, placement)
    return parallelism, placement


def parse_devices(text: str, gpus: int) -> tuple[str, ...]:
    """The devices that `text` lists, every GPU where it is empty, and () for "the CPU, as often as needed"."""
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    if not names:
        return tuple(f"cuda:{index}" for index in range(gpus))
    return tuple(_device(name, gpus) for name in names)


def _device(name: str, gpus: int) -> str:
    if name == "cpu":
        return name
    index = name.removeprefix("cuda:")
    if not index.isdecimal():
        raise Refused(f"devices: {name!r} is no device; write GPU numbers such as 0,1 or cuda:0,cuda:1, or cpu")
    if int(index) >= gpus:
        there = f"GPUs 0 to {gpus - 1}" if gpus else "no CUDA GPU that ComfyUI uses"
        raise Refused(f"devices: there is no GPU {index} here ({there}); leave devices empty to use what there is")
    return f"cuda:{int(index)}"


def _degrees(request: ParallelRequest, world: int, heads: int) -> tuple[int, int]:
    """Fill in what is 0: Ulysses first, as far as the heads divide evenly, then the ring."""
    ring, ulysses = request.ring_degree, request.ulysses_degree
    if ring < 0 or ulysses < 0:
        raise Refused(f"degrees are 0 (auto) or more, got ring_degree {ring}, ulysses_degree {ulysses}")
    world = max(world, ring, ulysses, 1)
    if ring and not ulysses:
        ulysses = max((d for d in range(1, world // ring + 1) if heads % d == 0), default=1)
    elif not ulysses:
        ulysses = max(d for d in range(1, world + 1) if world % d == 0 and heads % d == 0)
    return ring or max(1, world // ulysses), ulysses


def _too_much(ring: int, ulysses: int, devices: tuple[str, ...], limit: int, heads: int) -> str:
    possible = [(r, u) for u in range(1, min(heads, limit) + 1) for r in range(1, limit // u + 1)]
    r, u = min(possible, key=lambda p: (abs(p[0] * p[1] - min(ring * ulysses, limit)), abs(p[0] - ring), p))
    wanted = f"ring_degree {ring} x ulysses_degree {ulysses}"
    if ring * ulysses > limit:
        where = f"{len(devices)} device(s): {', '.join(devices)}" if devices else f"room for {limit} CPU workers"
        reason = f"{wanted} needs {ring * ulysses} workers, but there is {where}"
    else:
        reason = f"{wanted} splits {heads} attention heads over {ulysses} workers, more than there are heads"
    return f"{reason}. The nearest that works is ring_degree {r} x ulysses_degree {u}"


def _check_backend(backend: AttentionBackend, placement: Placement) -> None:
    if backend in ("auto", "native"):
        return
    if any(not device.startswith("cuda") for device in placement.devices):
        raise Refused(f"attention_backend {backend} needs CUDA GPUs, and the workers run on the CPU; choose auto")
    package = BACKEND_PACKAGES.get(backend)
    if package and importlib.util.find_spec(package) is None:
        raise Refused(f"attention_backend {backend} needs the package {package}, which is not installed; choose auto")
