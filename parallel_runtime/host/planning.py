"""From what the user asked for to degrees and devices, or to one sentence that says why not and what would work."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

from ..errors import Refused
from ..specs import AttentionBackend, Parallelism, ParallelRequest, Placement

Seconds = Callable[[Parallelism], float]

MAX_CPU_WORKERS = max(8, os.cpu_count() or 1)
BACKEND_PACKAGES: dict[AttentionBackend, str] = {
    "flash": "flash_attn",
    "_flash_3": "flash_attn_interface",
    "sage": "sageattention",
}


def plan(
    request: ParallelRequest, *, heads: int, gpus: int, guided: bool = False, seconds: Seconds | None = None
) -> tuple[Parallelism, Placement]:
    """Degrees and devices for a model with `heads` attention heads on a host with `gpus` visible GPUs.

    `guided`: positive and negative prompt are both evaluated. Without that, what cfg_degree would have used joins the
    sequence: the workers stay the same and none is idle. `seconds(degrees)` of one evaluation decides between ring and
    Ulysses where both are auto; without it Ulysses comes first. Raises Refused where the request cannot work.
    """
    devices = parse_devices(request.devices, gpus)
    degrees = _degrees(request, len(devices), heads, guided, seconds)
    limit = len(devices) if devices else MAX_CPU_WORKERS
    if degrees.world_size > limit or degrees.ulysses_degree > heads:
        raise Refused(_too_much(degrees, devices, limit, heads))
    placement = Placement(devices=devices[: degrees.world_size] or ("cpu",) * degrees.world_size)
    _check_backend(request.attention_backend, placement)
    return degrees, placement


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


def _degrees(request: ParallelRequest, world: int, heads: int, guided: bool, seconds: Seconds | None) -> Parallelism:
    """Fill in what is 0: the two branches of guidance first, then Ulysses as far as heads divide, then the ring."""
    ring, ulysses, cfg, data = request.ring_degree, request.ulysses_degree, request.cfg_degree, request.data_degree
    if min(ring, ulysses, cfg) < 0 or data < 1 or cfg > 2:
        raise Refused(
            f"degrees are 0 (auto) or more, cfg_degree at most 2, data_degree at least 1; got ring_degree {ring}, "
            f"ulysses_degree {ulysses}, cfg_degree {cfg}, data_degree {data}"
        )
    free = not ring and not ulysses
    rest = max(1, world // data)
    if cfg == 0:
        cfg = 2 if guided and free and rest % 2 == 0 else 1
    ring, ulysses = _cut(ring, ulysses, max(1, rest // cfg), heads, seconds)
    if cfg == 2 and not guided:
        cfg, ring, ulysses = 1, *((ring, 2 * ulysses) if heads % (2 * ulysses) == 0 else (2 * ring, ulysses))
    return Parallelism(
        ring_degree=ring,
        ulysses_degree=ulysses,
        cfg_degree=cfg,
        data_degree=data,
        rotate_method=request.rotate_method,
        convert_to_fp32=request.convert_to_fp32,
        attention_backend=request.attention_backend,
    )


def _cut(ring: int, ulysses: int, world: int, heads: int, seconds: Seconds | None) -> tuple[int, int]:
    """Ring and Ulysses degree for `world` workers on one sequence; a degree that is not 0 is kept."""
    if ring and ulysses:
        return ring, ulysses
    if ulysses:
        return max(1, world // ulysses), ulysses
    if ring:
        return ring, max(d for d in range(1, max(1, world // ring) + 1) if heads % d == 0)
    cuts = [(world // d, d) for d in range(world, 0, -1) if world % d == 0 and heads % d == 0]
    if seconds is None:
        return cuts[0]
    return min(cuts, key=lambda cut: seconds(Parallelism(ring_degree=cut[0], ulysses_degree=cut[1])))


def _too_much(degrees: Parallelism, devices: tuple[str, ...], limit: int, heads: int) -> str:
    ring, ulysses = degrees.ring_degree, degrees.ulysses_degree
    others = degrees.cfg_degree * degrees.data_degree
    room = max(1, limit // others)
    possible = [(r, u) for u in range(1, min(heads, room) + 1) for r in range(1, room // u + 1)]
    r, u = min(possible, key=lambda p: (abs(p[0] * p[1] - min(ring * ulysses, room)), abs(p[0] - ring), p))
    wanted = f"ring_degree {ring} x ulysses_degree {ulysses}"
    for name in ("cfg_degree", "data_degree"):
        if getattr(degrees, name) > 1:
            wanted += f" x {name} {getattr(degrees, name)}"
    if degrees.world_size > limit:
        where = f"{len(devices)} device(s): {', '.join(devices)}" if devices else f"room for {limit} CPU workers"
        reason = f"{wanted} needs {degrees.world_size} workers, but there is {where}"
    else:
        reason = f"{wanted} splits {heads} attention heads over {ulysses} workers, more than there are heads"
    fewer = "" if others <= limit else " with cfg_degree 1 and data_degree 1"
    shared = "" if len(devices) != 1 else f"; or let workers share it: devices {','.join(devices * degrees.world_size)}"
    return f"{reason}. The nearest that works is ring_degree {r} x ulysses_degree {u}{fewer}{shared}"


def _check_backend(backend: AttentionBackend, placement: Placement) -> None:
    if backend in ("auto", "native"):
        return
    if any(not device.startswith("cuda") for device in placement.devices):
        raise Refused(f"attention_backend {backend} needs CUDA GPUs, and the workers run on the CPU; choose auto")
    package = BACKEND_PACKAGES.get(backend)
    if package and importlib.util.find_spec(package) is None:
        raise Refused(f"attention_backend {backend} needs the package {package}, which is not installed; choose auto")
