"""How much faster two ranks are than one: ours and diffusers' own context parallelism, side by side.

    python -m tests.bench.scaling [--tokens 2304 4608] [--rounds 5] [--json out.json]

Every rank has one thread; every mode takes its turn in every round, so that neighbours disturb all modes alike.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from parallel_runtime.for_diffusers import attach, detach
from parallel_runtime.report.diffusers_own import parallel as diffusers_parallel
from parallel_runtime.specs import Parallelism
from parallel_runtime.worker.engine.mesh import ContextMesh, build_mesh

from .flux_like import build, inputs
from .launch import is_rank, join, launch

log = logging.getLogger(__name__)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    options = _options()
    if not is_rank():
        return launch("tests.bench.scaling", options.world, sys.argv[1:])
    rank, world = join()
    rows = [row for tokens in options.tokens for row in _measure(options, tokens, rank, world)]
    if rank == 0:
        _report(rows, options.json)
    dist.destroy_process_group()
    return 0


@torch.no_grad()
def _measure(options: argparse.Namespace, tokens: int, rank: int, world: int) -> list[dict[str, Any]]:
    transformer = build(options.double, options.single, options.heads)
    made = inputs(tokens)
    modes = _modes(transformer, world)
    times: dict[str, list[float]] = {name: [] for name in modes}
    outputs: dict[str, torch.Tensor] = {}
    for _ in range(options.rounds + 1):
        for name, mode in modes.items():
            dist.barrier()
            if name != "1 rank" or rank == 0:
                with mode():
                    start = time.perf_counter()
                    outputs[name] = transformer(**made, return_dict=False)[0]
                    times[name].append(time.perf_counter() - start)
    parameters = sum(parameter.numel() for parameter in transformer.parameters())
    return _rows(times, outputs, tokens, world, parameters) if rank == 0 else []


def _modes(transformer: Any, world: int) -> dict[str, Callable[[], Any]]:
    meshes = {
        "ulysses": build_mesh(Parallelism(ulysses_degree=world)),
        "ring": build_mesh(Parallelism(ring_degree=world)),
    }
    degrees = {"ulysses": Parallelism(ulysses_degree=world), "ring": Parallelism(ring_degree=world)}
    degrees["allgather"] = Parallelism(ring_degree=world, rotate_method="allgather")
    meshes["allgather"] = meshes["ring"]
    modes: dict[str, Callable[[], Any]] = {"1 rank": nullcontext}
    for name, parallelism in degrees.items():
        modes[f"ours {name}"] = lambda mesh=meshes[name], p=parallelism: _ours(transformer, mesh, p)  # type: ignore[misc]
    for name in ("ulysses", "ring"):
        p = degrees[name]
        shape = (p.ring_degree, p.ulysses_degree)
        theirs = init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses"))
        modes[f"diffusers {name}"] = lambda p=p, theirs=theirs: diffusers_parallel(  # type: ignore[misc]
            transformer, theirs, p.ring_degree, p.ulysses_degree
        )
    return modes


@contextmanager
def _ours(transformer: Any, mesh: ContextMesh, parallelism: Parallelism) -> Iterator[None]:
    attach(transformer, mesh, parallelism)
    try:
        yield
    finally:
        detach(transformer)


def _rows(
    times: dict[str, list[float]], outputs: dict[str, torch.Tensor], tokens: int, world: int, parameters: int
) -> list[dict[str, Any]]:
    reference = outputs["1 rank"]
    alone = statistics.median(times["1 rank"][1:])
    rows = []
    for name, seconds in times.items():
        median = statistics.median(seconds[1:])  # the first round warms up
        rows.append(
            {
                "tokens": tokens,
                "mode": name,
                "median_s": median,
                "min_s": min(seconds[1:]),
                "speedup": alone / median,
                "speedup_of_minima": min(times["1 rank"][1:]) / min(seconds[1:]),
                "error": float((outputs[name] - reference).abs().max() / reference.std()),
                "ranks": 1 if name == "1 rank" else world,
                "parameters": parameters,
                "rounds": len(seconds) - 1,
            }
        )
    return rows


def _report(rows: list[dict[str, Any]], path: Path | None) -> None:
    log.info(
        "%-8s %-18s %10s %10s %9s %9s %9s", "tokens", "mode", "median s", "min s", "speed-up", "of minima", "error"
    )
    for row in rows:
        log.info("%(tokens)-8d %(mode)-18s %(median_s)10.3f %(min_s)10.3f %(speedup)9.2f %(speedup_of_minima)9.2f "
                 "%(error)9.1e", row)  # fmt: skip
    if path:
        path.write_text(json.dumps(rows, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2304, 4608])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--double", type=int, default=3, help="double-stream blocks")
    parser.add_argument("--single", type=int, default=6, help="single-stream blocks")
    parser.add_argument("--heads", type=int, default=8, help="of 64 dims")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
