"""Host time of one attention and of a VAE's layers: what Python and PyTorch's dispatch cost a rank beside the kernels.

    python -m tests.bench.overhead [--workers 2 8] [--tokens 64] [--head-dim 8] [--repeats 200] [--json out.json]

One process of one thread, in a process group whose collectives do nothing, with so little to compute that what is
left is overhead. Plain, ours and diffusers' own take turns; medians. FLUX has 24 heads and 57 such layers. Of 57
of ours also what the host launches and calls, eager and recorded: counts, since a CPU has no graphs to time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel_runtime.engine.attention.context_attention import ContextAttention
from parallel_runtime.engine.comm.mesh import build_mesh
from parallel_runtime.engine.split.streams import Streams
from parallel_runtime.specs import Parallelism

from . import harness
from .host_work import counted
from .report.diffusers_own import log_sum_exp_on_the_cpu
from .vae_layers import vae_layers

HEADS = 24
COLUMNS = {"workers": "{workers}", "mode": "{mode}", "us": "{microseconds:.0f}", "beside": "{beside}",
           "eager: launches, calls": "{eager}", "recorded: launches, calls": "{recorded}"}  # fmt: skip
Call = Callable[[], Tensor]


def main() -> None:
    options = harness.options(__doc__, workers=[2, 8], tokens=64, head_dim=8, repeats=200)
    if harness.is_rank():
        harness.answer(_rows(options.workers[0], options))
    else:  # a process for each number of workers: a group is made once
        rows = (row for each in options.workers for row in harness.launch("overhead", "--workers", str(each)))
        harness.report(rows, COLUMNS, options.json)


def _rows(world: int, options: argparse.Namespace) -> list[harness.Row]:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    with torch.inference_mode(), log_sum_exp_on_the_cpu():
        calls = _modes(world, options) | vae_layers(world)
        turns = {name: partial(harness.seconds_of, call, time.thread_time) for name, call in calls.items()}
        seconds = harness.turns(turns, options.repeats, warm_up=10)
        us = {name: 1e6 * statistics.median(each) for name, each in seconds.items()}
        counts = {f"ours {name}": _counts(ring, ulysses, options) for name, ring, ulysses in _degrees(world)}
    uncounted = {"eager": "", "recorded": ""}
    return [
        {"workers": world, "mode": name, "microseconds": us[name], "beside": _beside(name, us)}
        | counts.get(name, uncounted)
        for name in us
    ]


def _beside(name: str, us: dict[str, float]) -> str:
    """One of ours beside diffusers' own, and a divided layer beside the plain one."""
    if not name.startswith("ours"):
        return ""
    if plain := us.get(name.replace("ours", "plain")):
        return f"{us[name] - plain:+.0f} us"
    return f"{us[name] / us[name.replace('ours', 'diffusers')]:.2f} x diffusers'"


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
    return ContextAttention(mesh, parallelism, streams, ("image",), ("image",))


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


if __name__ == "__main__":
    main()
