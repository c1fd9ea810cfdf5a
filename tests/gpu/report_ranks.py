"""One rank of a part of the report: every kernel and every way of cutting, against float64 and against the clock.

Started by tests.gpu.report. Errors are mean differences over the reference's deviation, beside those of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_runtime.specs import AttentionBackend, Parallelism
from parallel_runtime.worker.engine.attention import ContextAttention
from parallel_runtime.worker.engine.kernels import attend, check_backend
from parallel_runtime.worker.engine.mesh import ContextMesh, build_mesh
from parallel_runtime.worker.engine.race import results
from parallel_runtime.worker.engine.streams import Streams

from ..bench.launch import is_rank, launch

HEADS, HEAD_DIM, REPEATS = 24, 128, 5
JUDGED = 512  # queries against float64: more would take all the time there is
Row = dict[str, Any]


def main() -> int:
    options = _options()
    if not is_rank():
        return launch("tests.gpu.report_ranks", options.launch, sys.argv[1:])
    device = joined(options.device)
    rows = [row for backend in _backends(device) for row in _rows(backend, options.tokens, device)]
    if int(os.environ["RANK"]) == 0:
        options.out.write_text(json.dumps([*rows, *_races()]))
    dist.destroy_process_group()
    return 0


def joined(kind: str) -> torch.device:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_grad_enabled(False)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "cpu:gloo"
    store = dist.FileStore(os.environ["BENCH_STORE"], world)
    bound = device if kind == "cuda" else None
    limit = timedelta(minutes=5)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit, device_id=bound)
    return device


def _backends(device: torch.device) -> list[AttentionBackend]:
    found = []
    for backend in get_args(AttentionBackend):
        try:
            check_backend(backend, device)
        except (ValueError, RuntimeError):
            continue
        found.append(backend)
    return found


def _rows(backend: AttentionBackend, tokens: int, device: torch.device) -> list[Row]:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, tokens, HEADS, HEAD_DIM, generator=generator).to(device, dtype) for _ in range(3)
    )
    exact = _reference(query[:, :JUDGED], key, value)
    alone = attend(query, key, value, None, None, backend)
    error = _error(alone[:, :JUDGED], exact)
    plain = milliseconds(lambda: attend(query, key, value, None, None, backend), device)
    found = [_row(f"{backend}, one process", dtype, error, error, plain)]
    for name, parallelism in degrees_of(backend):
        mesh = build_mesh(parallelism, device)
        attention, own = _cut(mesh, parallelism, tokens)
        q, k, v = (tensor[:, own] for tensor in (query, key, value))
        got = attention(q, k, v)
        judged = slice(own.start, min(own.stop, JUDGED))
        ours = _error(got[:, : judged.stop - judged.start], exact[:, judged]) if judged.start < judged.stop else 0.0
        found.append(_row(f"{backend}, {name}", dtype, ours, error, milliseconds(lambda: attention(q, k, v), device)))  # noqa: B023
    return found


def degrees_of(backend: AttentionBackend) -> list[tuple[str, Parallelism]]:
    world = dist.get_world_size()
    shapes = {(world, 1), (1, world)} | ({(2, world // 2)} if world % 2 == 0 and world > 2 else set())
    ways = [(ring, ulysses, method) for ring, ulysses in sorted(shapes) for method in ("alltoall", "allgather")]
    return [
        (f"ring {ring} x Ulysses {ulysses}, {method}",
         Parallelism(ring_degree=ring, ulysses_degree=ulysses, rotate_method=cast(Any, method),
                     attention_backend=backend))
        for ring, ulysses, method in ways
        if world > 1 and (ring > 1 or method == "alltoall")
    ]  # fmt: skip


def _cut(mesh: ContextMesh, parallelism: Parallelism, tokens: int) -> tuple[ContextAttention, slice]:
    streams = Streams(mesh.context.size)
    streams.see("image", tokens, "report")
    sizes = streams.spread(("image",))
    start = sum(sizes[: mesh.context.index])
    return ContextAttention(mesh, parallelism, streams, ("image",)), slice(start, start + sizes[mesh.context.index])


def _reference(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (tensor.double().transpose(1, 2) for tensor in (query, key, value))
    return ((q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2)


def _error(out: Tensor, exact: Tensor) -> float:
    assert not out.isnan().any(), "NaN"
    return float((out.double() - exact).abs().mean() / exact.std())


def milliseconds(run: Callable[[], Tensor], device: torch.device) -> float:
    times = []
    for _ in range(REPEATS + 1):
        dist.barrier()
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return 1e3 * min(times[1:])


def _row(what: str, dtype: torch.dtype, error: float, alone: float, milliseconds: float) -> Row:
    name = str(dtype).removeprefix("torch.")
    return {"what": what, "dtype": name, "error": error, "alone": alone, "ms": milliseconds}


def _races() -> list[Row]:
    """What the ring's kernels took on a block, as `auto` has measured it."""
    return [
        {"what": f"race: {name}, {race.block}", "dtype": "", "error": 0.0, "alone": 0.0, "ms": microseconds / 1e3}
        for race in results()
        for name, microseconds in zip(race.kernels, race.microseconds, strict=True)
    ]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--launch", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=4608)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
