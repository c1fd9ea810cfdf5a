"""Starts the processes of a part of the report, passes their rows on as they come, and ends them in time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import IO

from ..accelerators import environment
from ..worker.ranks import ONE_CARD
from .cases import REST, Row, Setting
from .part import PARENT, STORE

ROOT = Path(__file__).resolve().parents[2]
GRACE_SECONDS = 5.0  # for the others when one has failed
WORDS = 600  # of what a process said last


def rows_of(part: str, setting: Setting, *, processes: int, seconds: float) -> Iterator[Row]:
    """What `processes` ranks find, row by row; where they fail or are cut off a last row says so."""
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "errors").open("w+") as errors:
        ranks = [_start(part, setting, rank, processes, folder, errors) for rank in range(processes)]
        late = threading.Event()
        guard = threading.Thread(target=_guard, args=(ranks, seconds, late), daemon=True)
        guard.start()
        try:
            assert ranks[0].stdout is not None
            yield from map(json.loads, ranks[0].stdout)
            guard.join()
        finally:
            _end(ranks)
        codes = [rank.wait() for rank in ranks]
        if late.is_set():
            yield {"what": REST, "failed": f"not done after {seconds:.0f} s: too slow, or it hangs"}
        elif any(codes):
            errors.seek(0)
            last = " ".join(errors.read()[-WORDS:].split())
            ended = ", ".join(f"rank {rank} with {code}" for rank, code in enumerate(codes) if code)
            yield {"what": REST, "failed": f"processes ended: {ended}: {last}"}


def _start(part: str, setting: Setting, rank: int, world: int, folder: str, errors: IO[str]) -> subprocess.Popen[str]:
    place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    mine = {name: str(value) for name, value in place.items()} | {STORE: f"{folder}/store", PARENT: str(os.getpid())}
    mine |= {ONE_CARD: "1"} if setting.one_card else {}
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.part", part, json.dumps(asdict(setting))],
        cwd=ROOT,
        env=os.environ | environment("lo") | quiet | mine,
        stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
        stderr=errors,
        text=True,
        start_new_session=True,
    )


def _guard(ranks: list[subprocess.Popen[str]], seconds: float, late: threading.Event) -> None:
    """Waits for all; ends all when the time is over, and soon after one has failed, for whom the others would wait."""
    deadline, failed = time.monotonic() + seconds, False
    while any(rank.poll() is None for rank in ranks):
        if not failed and any(rank.poll() for rank in ranks):
            deadline, failed = min(deadline, time.monotonic() + GRACE_SECONDS), True
        if time.monotonic() > deadline:
            if not failed:
                late.set()
            _end(ranks)
        time.sleep(0.05)


def _end(ranks: list[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            os.killpg(rank.pid, signal.SIGKILL)
