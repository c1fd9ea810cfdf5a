"""One persistent gloo group per world size, started when a test first asks for it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_runtime.engine import cuda_graphs

from ..site.tape import TapeRecorder

_ROOT = Path(__file__).parents[2]
_LIMIT = 120.0


CASES = (
    "cases",
    "side_cases",
    "model_cases",
    "cache_cases",
    "compile_cases",
    "kernel_choice_cases",
    "device_cases",
    "share_cases",
    "refusals",
)


class Ranks:
    """All groups of this session, behind one process (see `ranks`) of `python`, for cases of these modules."""

    def __init__(
        self, python: Path | str, modules: Iterable[str], environment: Mapping[str, str] | None = None
    ) -> None:
        command = [str(python), "-m", "tests.engine.ranks", *modules]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(environment or {})}
        self._process = subprocess.Popen(
            command, cwd=_ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )

    def run(self, world: int, case: str, arguments: dict[str, Any]) -> list[Any]:
        """What each of `world` ranks answers to `module:function`, called with rank, world and `arguments`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([world, case, arguments]).encode() + b"\n")
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], _LIMIT)[0]:
            self.close()
            raise TimeoutError(f"{case} gave no answer in {_LIMIT:.0f} s")
        answers = json.loads(self._process.stdout.readline())
        failed = [f"rank {rank}: {answer['error']}" for rank, answer in enumerate(answers) if "error" in answer]
        assert not failed, "\n".join(failed)
        return [answer["value"] for answer in answers]

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Group:
    """The ranks of one world size."""

    def __init__(self, ranks: Ranks, world: int) -> None:
        self._ranks = ranks
        self._world = world

    def run(self, case: str, **arguments: Any) -> list[Any]:
        return self._ranks.run(self._world, case, arguments)


Groups = Callable[[int], Group]


@pytest.fixture(scope="session")
def groups() -> Iterator[Groups]:
    ranks = Ranks(sys.executable, [f"tests.engine.{name}" for name in CASES])
    yield lambda world: Group(ranks, world)
    ranks.close()


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forwards are recorded by tape."""
    monkeypatch.setattr(cuda_graphs, "recorder_for", lambda device: TapeRecorder())
    with torch.inference_mode():
        yield
