"""From what the user asked for to degrees and devices, or to one sentence that says why not and what would work."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod

from ..accelerators import CUDA
from ..errors import Refused
from ..specs import AttentionBackend, Division, GraphsChoice, Parallelism, ParallelRequest, Placement
from ..wire.handshake import read_key
from . import endpoint
from .cost import Figures
from .devices import parse_devices, why_one_gpu
from .pipelines import check_pipeline
from .shares import are_uneven, are_unused, asked_for

Seconds = Callable[[Parallelism], float]

MAX_DEGREE = 64
ANY_HEADS = 5040  # divides well: where no model is known, or a VAE, which has no heads to share out
MAX_CPU_WORKERS = max(8, os.cpu_count() or 1)
BACKEND_PACKAGES: dict[AttentionBackend, str] = {
    "flash": "flash_attn",
    "_flash_3": "flash_attn_interface",
    "sage": "sageattention",
}


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a run asks for: `request`, for a model with `heads` attention heads, on a host with `gpus` visible GPUs of a
    `kind`.

    `whole` names a network that no plan can cut by sequence: prompts and images are all there is to share.
    `guided`: positive and negative prompt are both evaluated; not by workers of their own where something sees all
    prompts and images `together`. Without that, what cfg_degree would have used joins the sequence, or the rows of the
    batch where no plan cuts it: the workers stay the same.
    `ringless`: a node's attention gives no log-sum-exp to merge blocks by.
    """

    request: ParallelRequest
    heads: int = ANY_HEADS
    gpus: int
    kind: str = CUDA.kind
    guided: bool = False
    together: bool = False
    ringless: bool = False
    whole: str = ""


def plan(wish: Wish, seconds: Seconds | None = None) -> Division:
    """Degrees and devices. `seconds(degrees)` of one evaluation decides between ring and Ulysses where both are auto;
    without it Ulysses comes first. Raises Refused where the request cannot work.
    """
    request, heads, gpus = wish.request, wish.heads, wish.gpus
    devices = parse_devices(request.devices, gpus, wish.kind)
    nnodes = _machines(request)
    world = nnodes * max(1, len(devices))
    check_pipeline(request, wish.whole)
    guided, whole = wish.guided and not wish.together, wish.whole
    ringless = wish.ringless or request.pipeline_degree > 1
    if whole:
        asked = _undivided(request, 1 if wish.together else world, whole)
    else:
        if ringless and request.ring_degree > 1 and request.pipeline_degree == 1:
            raise Refused(
                "a node on MODEL replaces the attention and gives no log-sum-exp, which a ring needs, and ring_degree "
                f"is {request.ring_degree}; set it to 1 and use ulysses_degree, or take that node away"
            )
        asked = _degrees(request, world, heads, guided, ringless, seconds)
    limit = nnodes * (len(devices) or MAX_CPU_WORKERS)
    if asked.world_size > limit or asked.ulysses_degree > heads:
        hidden = f". {why}" if "cpu" not in devices and (why := why_one_gpu(gpus)) else ""
        nearest = _nearest(asked, limit, heads, nnodes).by_name
        fix = {name: degree for name, degree in nearest.items() if getattr(request, name)}
        raise Refused(_too_much(asked, devices, limit, heads, nnodes) + hidden, fix)
    here, left = divmod(asked.world_size, nnodes)
    if left:
        raise Refused(
            f"{_named(asked)} makes {asked.world_size} workers, which {nnodes} machines cannot share evenly; choose "
            f"degrees with a product divisible by {nnodes}, or set them to 0"
        )
    if request.devices.strip(" ,") and here < len(devices) and not whole:
        raise Refused(
            f"devices names {len(devices)} ({', '.join(devices)}), but {_named(asked)} needs {here} "
            f"worker(s){' on each machine' if nnodes > 1 else ''}; name {here}, or set degrees to 0"
        )
    every, devices = len(devices), devices[:here] or ("cpu",) * here
    placement = Placement(devices=devices, nnodes=nnodes, rdzv_endpoint=request.rdzv_endpoint if nnodes > 1 else "")
    _check_backend(request.attention_backend, placement)
    _check_graphs(request.cuda_graphs, placement)
    as_one = asked
    if asked.cfg_degree == 2:
        as_one = _rows_for_prompts(asked) if whole else _folded(asked, request, heads, ringless, seconds)
    if not guided:
        asked = as_one
    degrees = replace(asked, shares=asked_for(request.shares, asked.world_size, every, nnodes))
    if are_unused(degrees):
        if not whole or (request.cfg_degree and here == every):
            raise Refused(_nothing_uneven(request.shares, as_one), as_one.by_name)
        degrees = replace(degrees, shares=())  # of a config that a VAE has, too
    return Division(degrees=degrees, placement=placement)


def _undivided(request: ParallelRequest, world: int, network: str) -> Parallelism:
    """Both prompts side by side where there are devices for it, on as many groups as data_degree says."""
    _check_range(request)
    if max(request.ring_degree, request.ulysses_degree) > 1:
        raise Refused(
            f"{network} cannot be cut by sequence, got ring_degree {request.ring_degree} and ulysses_degree "
            f"{request.ulysses_degree}: set both to 0; cfg_degree 2 runs both prompts side by side, data_degree the "
            "images of a batch"
        )
    data = request.data_degree
    return request.with_degrees(cfg_degree=request.cfg_degree or (2 if world // data >= 2 else 1), data_degree=data)


def check_step_cache(request: ParallelRequest, figures: Figures) -> None:
    """Raises Refused where a threshold is asked for that is none, or of a family whose blocks cannot be skipped."""
    if not 0 <= request.step_cache <= 1:
        raise Refused(f"step_cache is a share from 0 (off) to 1, got {request.step_cache:g}")
    if request.step_cache and not (figures.divisible and figures.skippable):
        raise Refused(
            f"step_cache {request.step_cache:g}: a {figures.name} model has no blocks that workers can skip; set "
            "step_cache to 0",
            {"step_cache": 0.0},
        )


def _machines(request: ParallelRequest) -> int:
    """How many. Raises Refused where others could not find this one, or could not be told from strangers."""
    if request.nnodes < 1:
        raise Refused(f"nnodes, the number of machines, is at least 1, got {request.nnodes}")
    if request.nnodes > 1:
        endpoint.interface_of(endpoint.parse(request.rdzv_endpoint)[0])
        read_key()
    return request.nnodes


def _degrees(
    request: ParallelRequest, world: int, heads: int, guided: bool, ringless: bool, seconds: Seconds | None
) -> Parallelism:
    """Fill in what is 0: the two branches of guidance first, then Ulysses as far as heads divide, then the ring."""
    _check_range(request)
    ring, ulysses, cfg, data = request.ring_degree, request.ulysses_degree, request.cfg_degree, request.data_degree
    free = not ring and not ulysses
    rest = max(1, world // (data * max(1, request.pipeline_degree)))
    if cfg == 0:
        # Each branch of guidance would have a copy of the weights, which were to be as small as they can; and a prompt
        # is not cut, so that shares have the sequence to divide.
        apart = request.weights != "shard" and not are_uneven(request.shares)
        cfg = 2 if guided and free and rest % 2 == 0 and apart else 1
    ring, ulysses = _cut(ring or int(ringless), ulysses, max(1, rest // cfg), heads, seconds)
    return request.with_degrees(
        ring_degree=ring,
        ulysses_degree=ulysses,
        cfg_degree=cfg,
        data_degree=data,
        pipeline_degree=max(1, request.pipeline_degree),
    )


def _check_range(request: ParallelRequest) -> None:
    ring, ulysses, cfg, data = request.ring_degree, request.ulysses_degree, request.cfg_degree, request.data_degree
    if min(ring, ulysses, cfg) < 0 or data < 1 or cfg > 2 or max(ring, ulysses, data) > MAX_DEGREE:
        raise Refused(
            f"degrees are 0 (auto) to {MAX_DEGREE}, cfg_degree at most 2, data_degree at least 1; got "
            f"ring_degree {ring}, ulysses_degree {ulysses}, cfg_degree {cfg}, data_degree {data}"
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


def _folded(
    degrees: Parallelism, request: ParallelRequest, heads: int, ringless: bool, seconds: Seconds | None
) -> Parallelism:
    """Without a second branch of guidance, the workers that cfg_degree would have given it join the sequence: all of
    them, and where neither heads nor a ring have room for them the rows of the batch."""
    ring, ulysses = degrees.ring_degree, degrees.ulysses_degree
    if not (ringless or request.ring_degree or request.ulysses_degree):
        ring, ulysses = _cut(0, 0, 2 * ring * ulysses, heads, seconds)
    elif heads % (2 * ulysses) == 0 or (ringless and 2 * ulysses <= heads):
        ulysses *= 2
    elif ringless:
        return _rows_for_prompts(degrees)
    else:
        ring *= 2
    return replace(degrees, cfg_degree=1, ring_degree=ring, ulysses_degree=ulysses)


def _rows_for_prompts(degrees: Parallelism) -> Parallelism:
    """The same where the sequence cannot be cut further: they join the rows of the batch."""
    return replace(degrees, cfg_degree=1, data_degree=2 * degrees.data_degree)


def _too_much(asked: Parallelism, devices: tuple[str, ...], limit: int, heads: int, nnodes: int) -> str:
    if asked.world_size > limit:
        counted = f"are {len(devices)} devices" if len(devices) > 1 else "is 1 device"
        where = f"{counted}: {', '.join(devices)}" if devices else f"is room for {limit} CPU workers"
        where += f" on each of {nnodes} machines" if nnodes > 1 and devices else ""
        reason = f"{_named(asked)} needs {asked.world_size} workers, but there {where}"
    else:
        reason = (
            f"{_named(asked)} splits {heads} attention heads over {asked.ulysses_degree} workers, more than there are"
        )
    here = asked.world_size // nnodes
    shares = len(devices) == 1 and here <= MAX_CPU_WORKERS
    shared = f"; or let workers share it: devices {','.join(devices * here)}" if shares else ""
    return f"{reason}. The nearest that works is {_named(_nearest(asked, limit, heads, nnodes))}{shared}"


def _nearest(asked: Parallelism, limit: int, heads: int, nnodes: int) -> Parallelism:
    """Degrees, none larger than asked but the ring's, that use as many of the workers as they can."""
    goal = min(asked.world_size, limit)
    shapes = [
        (stages, data, cfg, ring, ulysses)
        for stages in range(1, min(asked.pipeline_degree, limit) + 1)
        for data in range(1, min(asked.data_degree, limit) + 1)
        for cfg in range(1, asked.cfg_degree + 1)
        for ulysses in range(1, min(asked.ulysses_degree, heads, limit) + 1)
        for ring in range(1, (limit // (stages * data * cfg * ulysses) if stages == 1 else 1) + 1)
        if stages * data * cfg * ulysses * ring % nnodes == 0 and stages * data * cfg * ulysses * ring <= limit
    ]
    wanted = asked.dims
    best = min(
        shapes, key=lambda s: (abs(prod(s) - goal), sum(abs(a - b) for a, b in zip(s, wanted, strict=True)), s[3])
    )
    stages, data, cfg, ring, ulysses = best
    return replace(
        asked,
        pipeline_degree=stages,
        patches=asked.patches if stages > 1 else 1,
        data_degree=data,
        cfg_degree=cfg,
        ring_degree=ring,
        ulysses_degree=ulysses,
    )


def _nothing_uneven(shares: str, as_one: Parallelism) -> str:
    return (
        f"shares {shares.strip()} divide nothing: with cfg_degree 2 each half of the workers has one prompt, and "
        f"within the halves all get alike; choose {_named(as_one)} with cfg_degree 1, or shares auto"
    )


def _named(degrees: Parallelism) -> str:
    names = ["ring_degree", "ulysses_degree"]
    names += [name for name in ("cfg_degree", "data_degree", "pipeline_degree") if getattr(degrees, name) > 1]
    return " x ".join(f"{name} {getattr(degrees, name)}" for name in names)


def _check_backend(backend: AttentionBackend, placement: Placement) -> None:
    if backend in ("auto", "native"):
        return
    if any(not device.startswith("cuda") for device in placement.devices):
        raise Refused(
            f"attention_backend {backend} needs CUDA GPUs, and the workers run on {placement.devices[0]}; choose auto",
            {"attention_backend": "auto"},
        )
    package = BACKEND_PACKAGES.get(backend)
    if package and importlib.util.find_spec(package) is None:
        raise Refused(
            f"attention_backend {backend} needs the package {package}, which is not installed; choose auto",
            {"attention_backend": "auto"},
        )


def _check_graphs(choice: GraphsChoice, placement: Placement) -> None:
    if choice == "on" and not all(device.startswith(CUDA.kind) for device in placement.devices):
        raise Refused(
            f"cuda_graphs on needs CUDA GPUs, and the workers run on {placement.devices[0]}; choose auto, which "
            "records where it can",
            {"cuda_graphs": "auto"},
        )
