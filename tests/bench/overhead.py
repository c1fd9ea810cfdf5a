"""Host time of one attention and of a VAE's layers: what Python and PyTorch's dispatch cost a rank beside the kernels.

    python -m tests.bench.overhead [--worlds 2 8] [--tokens 64] [--head-dim 8] [--rounds 200] [--json out.json]

One process of one thread, in a process group whose collectives do nothing, with so little to compute that what is
left is overhead. Plain, ours and diffusers' own take turns; medians. FLUX has 24 heads and 57 such layers. Of 57
of ours also what the host launches and calls, eager and recorded: counts, since a CPU has no graphs to time.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel_runtime.commands.report.diffusers_own import log_sum_exp_on_the_cpu
from parallel_runtime.engine.attention.context_attention import ContextAttention
from parallel_runtime.engine.comm.mesh import build_mesh
from parallel_runtime.engine.split.streams import Streams
from parallel_runtime.specs import Parallelism

from .host_work import LAYERS, counted
from .vae_layers import vae_layers

log = logging.getLogger(__name__)

HEADS = 24
Call = Callable[[], Tensor]


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    options = _options()
    if "OVERHEAD_WORLD" not in os.environ:
        return _each_world(options)
    torch.set_num_threads(1)
    world = int(os.environ["OVERHEAD_WORLD"])
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    with torch.inference_mode(), log_sum_exp_on_the_cpu():
        medians = _medians(_modes(world, options) | vae_layers(world), options.rounds)
        counts = {f"ours {name}": _counts(ring, ulysses, options) for name, ring, ulysses in _degrees(world)}
    measured = {"world": world, "microseconds": medians, "launches_and_calls": counts}
    Path(os.environ["OVERHEAD_OUT"]).write_text(json.dumps(measured))
    return 0


def _each_world(options: argparse.Namespace) -> int:
    """A process a world: a group is made once."""
    rows = []
    for world in options.worlds:
        out = (options.json or Path("overhead.json")).with_suffix(f".{world}")
        shared = {"OVERHEAD_WORLD": str(world), "OVERHEAD_OUT": str(out), "OMP_NUM_THREADS": "1"}
        quiet = {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        command = [sys.executable, "-m", "tests.bench.overhead", *sys.argv[1:]]
        subprocess.run(command, env=os.environ | shared | quiet, check=True)
        rows.append(json.loads(out.read_text()))
        out.unlink()
    for row in rows:
        _report(row)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def _modes(world: int, options: argparse.Namespace) -> dict[str, Call]:
    tokens = options.tokens // world
    query, key, value = (torch.randn(1, tokens, HEADS, options.head_dim) for _ in range(3))
    modes: dict[str, Call] = {"plain": lambda: dispatch_attention_fn(query, key, value, backend=_NATIVE)}
    for name, ring, ulysses in _degrees(world):
        ours = _ours(ring, ulysses, tokens * world)
        modes[f"ours {name}"] = lambda ours=ours: ours(query, key, value)  # type: ignore[misc]
        theirs = _diffusers(ring, ulysses)
        modes[f"diffusers {name}"] = lambda theirs=theirs: dispatch_attention_fn(  # type: ignore[misc]
            query, key, value, backend=_NATIVE, parallel_config=theirs
        )
    return modes


_NATIVE = AttentionBackendName.NATIVE


def _degrees(world: int) -> list[tuple[str, int, int]]:
    degrees = [("ring", world, 1), ("ulysses", 1, world)]
    return [*degrees, (f"2x{world // 2}", 2, world // 2)] if world > 2 else degrees


def _ours(ring: int, ulysses: int, tokens: int) -> ContextAttention:
    parallelism = Parallelism(ring_degree=ring, ulysses_degree=ulysses)
    mesh = build_mesh(parallelism, torch.device("cpu"))
    streams = Streams(mesh.context)
    streams.record_length("image", tokens, "bench")
    return ContextAttention(mesh, parallelism, streams, ("image",))


def _counts(ring: int, ulysses: int, options: argparse.Namespace) -> dict[str, list[int]]:
    tokens = options.tokens // (ring * ulysses)
    inputs = tuple(torch.randn(1, tokens, HEADS, options.head_dim) for _ in range(3))
    return counted(_ours(ring, ulysses, tokens * ring * ulysses), inputs)


def _diffusers(ring: int, ulysses: int) -> ParallelConfig:
    mesh = init_device_mesh("cpu", (ring, ulysses), mesh_dim_names=("ring", "ulysses"))
    config = ParallelConfig(
        context_parallel_config=ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, mesh=mesh)
    )
    config.setup(0, ring * ulysses, torch.device("cpu"), mesh=mesh)
    return config


def _medians(modes: dict[str, Call], rounds: int) -> dict[str, float]:
    """Every mode takes its turn in every round, so that neighbours disturb all alike."""
    times: dict[str, list[float]] = {name: [] for name in modes}
    for _ in range(rounds + 10):
        for name, call in modes.items():
            start = time.thread_time()
            call()
            times[name].append(time.thread_time() - start)
    return {name: 1e6 * statistics.median(seconds[10:]) for name, seconds in times.items()}  # ten warm up


def _report(row: dict[str, Any]) -> None:
    log.info("world %d", row["world"])
    by_name = row["microseconds"]
    for name, microseconds in by_name.items():
        other = by_name.get(name.replace("ours", "diffusers"))
        comparison = f"{microseconds / other:6.2f} x diffusers'" if name.startswith("ours") and other else ""
        if name.startswith("ours") and (plain := by_name.get(name.replace("ours", "plain"))):
            comparison = f"{microseconds - plain:+6.0f} us"
        log.info("  %-18s %8.0f us %s", name, microseconds, comparison)
    for name, by_mode in row["launches_and_calls"].items():
        for mode, (launches, calls) in by_mode.items():
            log.info(
                "  %-18s %8d launches, %d calls of Python functions for %d of them, %s",
                name,
                launches,
                calls,
                LAYERS,
                mode,
            )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--head-dim", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
