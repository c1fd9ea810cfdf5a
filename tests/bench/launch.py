"""Starts a bench module once per rank, and joins those ranks to one gloo group. No ports: they meet in a file."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist


def is_rank() -> bool:
    return "BENCH_STORE" in os.environ


def launch(module: str, world: int, arguments: list[str]) -> int:
    """Run `python -m module` on `world` ranks of one thread each; the first exit code that is not 0, or 0."""
    with tempfile.TemporaryDirectory() as directory:
        shared = {"BENCH_STORE": f"{directory}/store", "WORLD_SIZE": str(world), "GLOO_SOCKET_IFNAME": "lo"}
        quiet = {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "6"}
        environment = os.environ | shared | quiet | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", module, *arguments]
        ranks = [subprocess.Popen(command, env=environment | {"RANK": str(rank)}) for rank in range(world)]
        return next((code for code in [rank.wait() for rank in ranks] if code), 0)


def join() -> tuple[int, int]:
    """(rank, world) of this process, in the group."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    store = dist.FileStore(os.environ["BENCH_STORE"], world)
    dist.init_process_group("cpu:gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=5))
    return rank, world
