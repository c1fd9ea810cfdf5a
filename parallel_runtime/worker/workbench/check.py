"""A plan on two and three CPU ranks against the undivided network."""

from __future__ import annotations

import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from ...networks import network_of
from ...specs import Parallelism
from ..engine.divide import divide, undivide
from ..engine.mesh import build_mesh
from .subject import Subject, load_subject, run

EXACT = 1e-5
WAYS = (Parallelism(ring_degree=2), Parallelism(ulysses_degree=2), Parallelism(ring_degree=3))


def check(path: Path, comfyui: Path) -> int:
    """Says how far each way is from one process; 1 where one is not exact, or is refused."""
    network = load_subject(path, comfyui).network
    if network_of(network) is None:
        kind = type(network)
        sys.stdout.write(f"no plan for {kind.__module__}:{kind.__qualname__} is registered\n")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        failed = 0
        for number, way in enumerate(WAYS):
            out = Path(folder) / f"said{number}"
            arguments = (path, comfyui, way, f"{folder}/store{number}", out)
            processes.start_processes(_rank, arguments, nprocs=way.world_size, start_method="spawn")
            said, exact = out.read_text().split("\n")
            sys.stdout.write(f"ring {way.ring_degree}, ulysses {way.ulysses_degree}: {said}\n")
            failed |= exact != "True"
    return failed


def _rank(rank: int, path: Path, comfyui: Path, way: Parallelism, store: str, out: Path) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    world = way.world_size
    shared = dist.FileStore(store, world)
    dist.init_process_group("cpu:gloo", store=shared, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    said, exact = _compare(load_subject(path, comfyui), way)
    if rank == 0:
        out.write_text(f"{said}\n{exact}")
    dist.destroy_process_group()


def _compare(subject: Subject, way: Parallelism) -> tuple[str, bool]:
    found = network_of(subject.network)
    assert found is not None
    mesh, worst = build_mesh(way), 0.0
    for call in (subject.call, subject.more_rows, subject.more_text):
        wants = run(subject.network, call)
        divide(subject.network, found.plan, mesh, way)
        try:
            got = run(subject.network, call)
        except ValueError as refused:
            return " ".join(str(refused).split()), False
        finally:
            undivide(subject.network)
        worst = max(
            [worst, *((a - b).abs().max().item() / b.abs().max().item() for a, b in zip(got, wants, strict=True))]
        )
    return f"{worst:.1e} of the largest value", worst <= EXACT
