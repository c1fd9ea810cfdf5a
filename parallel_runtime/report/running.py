"""Starts the processes of a part of the report, passes their rows on as they come, and ends them in time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from ..accelerators import environment
from ..worker.ranks import ONE_CARD
from .cases import REST, Row, Setting
from .part import FOLDER, PARENT, ROWS

ROOT = Path(__file__).resolve().parents[2]
GRACE_SECONDS = 5.0  # for the others when one has failed, for which they would wait
WORDS = 600  # of what a process said last


def rows_of(part: str, setting: Setting, *, processes: int, seconds: float) -> Iterator[Row]:
    """What `processes` ranks find, row by row; where they fail or are cut off a last row says so."""
    with tempfile.TemporaryDirectory() as folder, Path(folder, ROWS).open("w+") as rows:
        said = Path(folder, "said")
        ranks = [_start(part, setting, rank, processes, said) for rank in range(processes)]
        deadline, failed = time.monotonic() + seconds, False
        try:
            while (running := any(rank.poll() is None for rank in ranks)) and time.monotonic() < deadline:
                if not failed and any(rank.poll() for rank in ranks):
                    deadline, failed = min(deadline, time.monotonic() + GRACE_SECONDS), True
                yield from map(json.loads, rows)
                time.sleep(0.05)
        finally:
            _end(ranks)
        yield from map(json.loads, rows)
        codes = [rank.wait() for rank in ranks]
        if running and not failed:
            yield {"what": REST, "failed": f"not done after {seconds:.0f} s: too slow, or it hangs"}
        elif any(codes):
            last = " ".join(said.read_text()[-WORDS:].split())
            ended = ", ".join(f"rank {rank} with {code}" for rank, code in enumerate(codes) if code)
            yield {"what": REST, "failed": f"processes ended: {ended}: {last}"}


def _start(part: str, setting: Setting, rank: int, world: int, said: Path) -> subprocess.Popen[bytes]:
    place = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "GROUP_RANK": 0, "GROUP_WORLD_SIZE": 1}
    mine = {name: str(value) for name, value in place.items()} | {FOLDER: str(said.parent), PARENT: str(os.getpid())}
    mine |= {ONE_CARD: "1"} if setting.one_card else {}
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    with said.open("a") as output:
        return subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.part", part, json.dumps(asdict(setting))],
            cwd=ROOT,
            env=os.environ | environment("lo") | quiet | mine,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            os.killpg(rank.pid, signal.SIGKILL)
