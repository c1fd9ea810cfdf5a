"""Worker groups for tests: tiny models, small jobs, and a look at the processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from parallel_runtime.group.worker_group import WorkerGroup
from parallel_runtime.jobs import DemoJob
from parallel_runtime.specs import DEMO, ModelSpec, Parallelism, Placement, SourceFile

if TYPE_CHECKING:  # ComfyUI's python, which runs some of the users of this module, has no pytest
    import pytest

TEXT, POOLED = 128, 64


class Stop(BaseException):
    """Like ComfyUI's interrupt, no Exception."""


def faulty(fault: str) -> dict[str, str]:
    """The environment in which workers start with this fault in them: see site/sitecustomize.py."""
    return {"PYTHONPATH": str(Path(__file__).parent / "site"), "CP_TEST_FAULT": fault}


def sabotage(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """From now on workers start with this fault in them."""
    for name, value in faulty(fault).items():
        monkeypatch.setenv(name, value)


def spec_of(path: Path | str, dtype: str = "float32") -> ModelSpec:
    stat = os.stat(path)
    file = SourceFile(path=str(path), size=stat.st_size, mtime_ns=stat.st_mtime_ns)
    return ModelSpec(loader=DEMO, files=(file,), weight_dtype=dtype)


def flux_job(
    *,
    seed: int = 0,
    steps: int = 4,
    size: tuple[int, int] = (8, 10),
    tokens: int = 7,
    negative_tokens: int = 7,
    batch: int = 1,
) -> DemoJob:
    """Guided Euler steps of a tiny FLUX.1, with prompts of random values."""
    generator = torch.Generator().manual_seed(seed)

    def cond(tokens: int) -> dict[str, torch.Tensor]:
        return {
            "c_crossattn": torch.randn(1, tokens, TEXT, generator=generator),
            "y": torch.randn(1, POOLED, generator=generator),
        }

    return DemoJob(
        noise=torch.randn(batch, 16, *size, generator=generator),
        sigmas=torch.linspace(1, 0, steps + 1),
        cfg=2.0,
        positive=cond(tokens),
        negative=cond(negative_tokens),
    )


def samples(group: WorkerGroup, model: ModelSpec, parallelism: Parallelism, **job: Any) -> torch.Tensor:
    return group.run(model, parallelism, flux_job(**job)).value["samples"]


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.02)


def on_cpu(parallelism: Parallelism) -> Placement:
    return Placement(devices=("cpu",) * parallelism.world_size)


def our_processes() -> dict[int, str]:
    """pid to command line of every live process of a worker group on this machine."""
    processes = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if "parallel_runtime.worker" in command and state != "Z":
                processes[int(entry.name)] = command
    return processes


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def workers_of(group: WorkerGroup) -> list[int]:
    """The pids of a group's ranks, in rank order."""
    return list(group.pids)


def models_of(group: WorkerGroup) -> list[set[str]]:
    """The fingerprints of the models that each rank has now."""
    return [{model.fingerprint for model in readings.weights} for readings in group.measure()]


def listening_addresses(pids: list[int]) -> list[str]:
    """The IPv4 and IPv6 addresses on which these processes listen, as /proc/net writes them."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(fd)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and row[9] in inodes]
