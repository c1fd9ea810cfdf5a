"""Chooses the kernel of attentions of one size: the requested one if all ranks have it, else the fastest in a benchmark
that all ranks take part in, once a group; it is repeated in the next run where memory was short.

All ranks choose the same. Knows no streams and moves no keys. `benchmark_results` returns the times, which the group
keeps as long as it lives.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...accelerators import FALLBACK, KERNELS, AttentionKernel, benchmark_candidates
from ...request import AttentionBackend
from ...wire.readings import WORTH_TELLING, BenchmarkKind, KernelBenchmark
from ..attention.masks import MaskKind
from ..comm.collectives import all_gather_v
from ..comm.mesh import GroupState, MeshDim
from .dispatch import FAULTS, NO_KERNEL, warn_once
from .registry import FUNCTIONS, FullAttention, cudnn_supports_graphs

REPEATS = 3
RUNS_PER_REPEAT = 4  # between two events
_WARMUP_SIZE = 4096  # of the matrix products that keep the device busy while runs are launched

log = logging.getLogger(__name__)

Measure = Callable[[str], float]  # returns the seconds of one run of the kernel of this name, or one of these two:
_UNAVAILABLE = math.inf  # this rank has no such kernel, or it computes something else: then no rank takes it
_UNKNOWN = math.nan  # this rank could not find out: then the whole benchmark is not used
_MAX_ERROR = 0.05  # of the values' deviation, and of a log-sum-exp: half precision is ten times closer
_MAX_ERROR_REQUESTED = 0.5  # a kernel requested by name may round more (sage)
# Where no kernel is preferred: a ring needs a log-sum-exp, which ComfyUI's own attention does not give.
_DEFAULT: dict[Literal["block", "full"], AttentionBackend] = {"block": "native", "full": FALLBACK}
_CHECKED_QUERIES = 16  # queries that are computed anew in float32, of the first and the last head


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """The sizes of the largest attention of any rank. All ranks must pass the same: they benchmark together."""

    batch: int
    queries: int
    keys: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    what: BenchmarkKind = "block"
    mask: MaskKind | None = None

    def __str__(self) -> str:
        batch = f"{self.batch} x " if self.batch > 1 else ""
        heads = f"{self.heads} heads of {self.head_dim}, {str(self.dtype).removeprefix('torch.')}"
        masked = "" if self.mask is None else ", masked"
        return f"{batch}{self.queries} queries x {self.keys} keys, {heads}{masked}"


def choose_kernel(
    backend: AttentionBackend,
    query: Tensor,
    sizes: AttentionSizes,
    mesh_dim: MeshDim,
    fallback: FullAttention,
    batch_groups: int = 1,
    recorded: bool = True,
) -> AttentionBackend:
    """Returns the kernel for ring blocks or full keys, as `sizes` say; FALLBACK stands for `fallback`. `recorded`: see
    `candidates`. Collective over `mesh_dim` for new sizes.

    Several `batch_groups` take the likely fastest without a benchmark: each would have its own, and groups that compute
    the same must agree to the bit.
    """
    what: Literal["block", "full"] = "block" if sizes.what == "block" else "full"
    fake = isinstance(query, FakeTensor)  # nothing can be measured
    if backend != "auto":
        if backend in ("native", FALLBACK) or fake or _available_on_all(backend, query, sizes, mesh_dim):
            return backend
        condition = "for a ring's blocks" if what == "block" else "for full keys"
        warn_once(backend, f"not every rank has it {condition}")
    names = candidates(query, what, masked=sizes.mask is not None, recorded=recorded)
    if fake:
        return names[0]
    if batch_groups > 1:
        return _likely_fastest(names, what, query, sizes, mesh_dim)
    # All names, also of kernels that this GPU lacks: other GPUs of the group may have them.
    all_names = [FALLBACK] * (what == "full") + benchmark_candidates(query.device.type, what) or ["native"]
    if len(all_names if mesh_dim.group_state.heterogeneous else names) == 1:
        return names[0]
    seconds = partial(_measure, sizes, query.device, fallback, names)
    times = slowest_rank_seconds(all_names, sizes, mesh_dim, seconds, query.device)
    return min(times, key=times.__getitem__, default=_DEFAULT[what])


def faster_kernel(query: Tensor, fallback: FullAttention, sizes: AttentionSizes, alone: MeshDim) -> str:
    """Returns the name of a kernel that is clearly faster than `fallback` for a worker without context parallelism, or
    ""."""
    names = candidates(query, "full")
    if isinstance(query, FakeTensor) or len(names) == 1:
        return ""
    seconds = partial(_measure, sizes, query.device, fallback, names)
    times = slowest_rank_seconds(names, sizes, alone, seconds, query.device)
    fastest = min(times, key=times.__getitem__, default=FALLBACK)
    return fastest if fastest != FALLBACK and times[FALLBACK] > WORTH_TELLING * times[fastest] else ""


def candidates(
    query: Tensor, what: Literal["block", "full"], *, masked: bool = False, recorded: bool = True
) -> list[AttentionBackend]:
    """Returns the kernels of this GPU to benchmark for ring blocks or full keys, the likely fastest first; before them,
    for full keys, FALLBACK. ["native"] for blocks without a choice. `recorded`: they may become part of a CUDA graph.

    Depends on nothing of `query` in which ranks differ: those on equal GPUs benchmark the same kernels."""
    kernels = (FUNCTIONS[name] for name in benchmark_candidates(query.device.type, what))
    usable = [
        kernel.spec
        for kernel in kernels
        if not kernel.unusable_reason(query) and not (recorded and kernel.spec.cudnn and not cudnn_supports_graphs())
    ]
    if what == "block":
        likely = [spec for spec in usable if not spec.fastest_on or _is_fastest(spec, query.device)]
        return [spec.name for spec in likely] or ["native"]
    return [FALLBACK, *(spec.name for spec in usable if spec.masks or not masked)]


def _is_fastest(spec: AttentionKernel, device: torch.device) -> bool:
    """Returns whether this kernel, which has `fastest_on`, was the fastest on GPUs such as this one."""
    return torch.cuda.get_device_capability(device)[0] in spec.fastest_on


def _likely_fastest(
    names: Sequence[AttentionBackend],
    what: Literal["block", "full"],
    query: Tensor,
    sizes: AttentionSizes,
    mesh_dim: MeshDim,
) -> AttentionBackend:
    """Returns the kernel that is the fastest on the GPUs of all ranks, by its row; _DEFAULT if there is none. This rank
    has `names`."""
    for name in benchmark_candidates(query.device.type, what):
        spec = KERNELS[name]
        if spec.fastest_on or what == "block":  # of blocks `names` are the likely ones already
            likely = name in names and (what == "block" or _is_fastest(spec, query.device))
            if _available_on_all(name, query, sizes, mesh_dim, likely=likely):
                return name
    return _DEFAULT[what]


def _available_on_all(
    backend: AttentionBackend, query: Tensor, sizes: AttentionSizes, mesh_dim: MeshDim, *, likely: bool = True
) -> bool:
    """Returns whether every rank of `mesh_dim` has this kernel for these sizes, computes correctly with it, and finds
    it `likely` to be the fastest."""
    seconds = partial(_measure, sizes, query.device, None, [backend] if likely else [], with_timing=False)
    return bool(slowest_rank_seconds([backend], sizes, mesh_dim, seconds, query.device))


def slowest_rank_seconds(
    names: Sequence[str], sizes: AttentionSizes, mesh_dim: MeshDim, seconds: Measure, device: torch.device
) -> dict[str, float]:
    """Returns the seconds on the slowest rank, for kernels that all have; {} if a rank could not find out. Collective
    over `mesh_dim` for new sizes, so all ranks must pass the same `names`."""
    key, benchmarks = (sizes, mesh_dim.ranks, tuple(names)), mesh_dim.group_state.kernel_seconds
    if key not in benchmarks:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return {}
        measured = [measured_seconds if (measured_seconds := seconds(name)) > 0 else _UNKNOWN for name in names]
        slowest = torch.tensor(measured, dtype=torch.float32, device=device)
        if mesh_dim.size > 1:
            (by_rank,) = all_gather_v(slowest[None], [1] * mesh_dim.size, mesh_dim).wait()
            slowest = by_rank.amax(dim=0)  # NaN where any is
        times = {name: value for name, value in zip(names, slowest.tolist(), strict=True) if value != _UNAVAILABLE}
        benchmarks[key] = None if any(map(math.isnan, times.values())) else times
        if mesh_dim.index == 0:
            _log_benchmark(sizes, times)
    return benchmarks[key] or {}


def _log_benchmark(sizes: AttentionSizes, times: dict[str, float]) -> None:
    """Logs a benchmark, as a warning: the log of a worker shows no less."""
    if any(map(math.isnan, times.values())):
        log.warning(
            "[CP] the benchmark of attention kernels failed on a worker (%s): this run uses the default kernel", times
        )
    elif len(times) > 1:
        log.warning("[CP] kernels: %s", _to_result(sizes, times))


def _measure(
    sizes: AttentionSizes,
    device: torch.device,
    fallback: FullAttention | None,
    available: Sequence[str],
    name: str,
    *,
    with_timing: bool = True,
) -> float:
    """Returns the seconds of one such attention, or 1.0 without timing. Only the `available` kernels are tried."""
    if name not in available:
        return _UNAVAILABLE
    try:
        q, k, v, mask = random_inputs(sizes, device)
        kernel, block = FUNCTIONS.get(name), sizes.what == "block"
        if kernel and kernel.unsupported_reason(q, k, v, mask, with_lse=block):
            return _UNAVAILABLE

        def run() -> tuple[Tensor, Tensor | None]:
            if kernel is None:
                assert fallback is not None
                return fallback(q, k, v, mask, None), None
            return kernel.block(q, k, v, None) if block else (kernel.full(q, k, v, mask, None), None)

        tolerance = _MAX_ERROR if with_timing else _MAX_ERROR_REQUESTED
        if name != FALLBACK and not _is_accurate(*run(), (q, k, v), mask, tolerance):
            return _UNAVAILABLE
        return time_runs(run, device) if with_timing else 1.0
    except torch.OutOfMemoryError:
        return _UNKNOWN
    except NO_KERNEL as error:
        if isinstance(error, FAULTS):
            raise
        return _UNAVAILABLE


def _is_accurate(
    out: Tensor, lse: Tensor | None, inputs: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, tolerance: float
) -> bool:
    """Compares some rows, and their log-sum-exp if there is one, with float32: some versions of some kernels compute
    something else."""
    q, k, v = inputs
    heads = [0, q.shape[2] - 1]
    queries = q[:, :_CHECKED_QUERIES, heads].transpose(1, 2).float() * q.shape[-1] ** -0.5
    scores = queries @ k[:, :, heads].transpose(1, 2).float().transpose(-1, -2)
    if mask is not None:
        mask = (mask[:, heads] if mask.shape[1] > 1 else mask)[:, :, :_CHECKED_QUERIES]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if lse is not None:
        lse_error = (lse[:, :_CHECKED_QUERIES, heads, 0].transpose(1, 2).float() - scores.logsumexp(-1)).abs().mean()
        if not lse_error <= tolerance:
            return False
    expected = (scores.softmax(-1) @ v[:, :, heads].transpose(1, 2).float()).transpose(1, 2)
    mean_error = (out[:, :_CHECKED_QUERIES, heads].float() - expected).abs().mean()
    return bool(mean_error <= tolerance * expected.std())  # not where it is not a number


def time_runs(run: Callable[[], object], device: torch.device) -> float:
    """Returns the device seconds of the fastest run, after a warm-up. Launch time is hidden behind matrix products, as
    in a graph replay."""
    run()
    warmup = torch.zeros(_WARMUP_SIZE, _WARMUP_SIZE, dtype=torch.bfloat16, device=device)
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
        for _ in range(RUNS_PER_REPEAT):
            torch.mm(warmup, warmup)
        begin.record()
        for _ in range(RUNS_PER_REPEAT):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / RUNS_PER_REPEAT)
    return min(times)


def random_inputs(sizes: AttentionSizes, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns queries, keys, values and a mask to benchmark with; in one tensor for full keys, as after Ulysses."""
    generator = torch.Generator(device).manual_seed(0)
    tokens = (sizes.queries, sizes.keys, sizes.keys)
    shape = (sizes.batch, sizes.heads, sizes.head_dim)
    options: Any = {"dtype": sizes.dtype, "device": device, "generator": generator}
    if sizes.what == "full" and sizes.queries == sizes.keys:
        packed = torch.randn(sizes.keys, sizes.batch, 3 * sizes.heads, sizes.head_dim, **options)
        q, k, v = packed.transpose(0, 1).split(sizes.heads, 2)
    else:
        q, k, v = (torch.randn(count, *shape, **options).transpose(0, 1) for count in tokens)
    return q, k, v, _test_mask(sizes, device)


def _test_mask(sizes: AttentionSizes, device: torch.device) -> Tensor | None:
    """Returns a mask that hides every seventh key from all queries."""
    if sizes.mask is None:
        return None
    dtype, *varies_by = sizes.mask
    dims = (sizes.batch, sizes.heads, sizes.queries)
    shape = [size if varies else 1 for size, varies in zip(dims, varies_by, strict=True)]
    hidden = (torch.arange(sizes.keys, device=device) % 7 == 0).expand(*shape, sizes.keys)
    if dtype == torch.bool:
        return ~hidden
    return torch.zeros(*shape, sizes.keys, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


def benchmark_results(group_state: GroupState) -> tuple[KernelBenchmark, ...]:
    """Returns the results of all benchmarks so far, the latest last."""
    results = ((sizes, times) for (sizes, _, _), times in group_state.kernel_seconds.items())
    return tuple(_to_result(sizes, times) for sizes, times in results if times and len(times) > 1)


def _to_result(sizes: AttentionSizes, times: dict[str, float]) -> KernelBenchmark:
    names = sorted(times, key=times.__getitem__)
    return KernelBenchmark(str(sizes), tuple(names), tuple(round(1e6 * times[name], 1) for name in names), sizes.what)
