"""First-block caching over several ranks: one decision, the one that a single process makes, and no hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from .conftest import Groups

BAR = 1e-5
CASES = "tests.engine.cache_cases"
ROOT = Path(__file__).parents[2]
DEGREES = [(2, 1), (1, 2), (3, 1), (2, 2)]
CALLS: dict[str, dict[str, Any]] = {
    "flux, batch 2": {"kind": "flux", "call": {"batch": 2}},
    "flux, fewer text tokens than ranks": {"kind": "flux", "call": {"text": 1}},
    "qwen, mask": {"kind": "qwen", "call": {"masked": 3}},
    "wan": {"kind": "wan", "call": {"frames": 2}},
    "wan, fewer tokens than ranks": {"kind": "wan", "call": {"height": 1, "width": 2}},
    "sd3, fewer image tokens than ranks": {"kind": "sd3_dual", "call": {"height": 1, "width": 2}},
    "lumina2": {"kind": "lumina2", "call": {}},
}
START_SECONDS = 60.0
WAIT_SECONDS = 4.0


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_rank_decides_on_the_tokens_of_all(
    groups: Groups, call: dict[str, Any], degrees: tuple[int, int]
) -> None:
    answers = groups(degrees[0] * degrees[1]).run(f"{CASES}:decisions_around_the_whole_change", degrees=degrees, **call)
    assert answers == [[True, False]] * len(answers)


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_ranks_skip_and_compute_is_what_one_process_does(
    groups: Groups, call: dict[str, Any], degrees: tuple[int, int]
) -> None:
    errors = groups(degrees[0] * degrees[1]).run(f"{CASES}:error_while_skipping", degrees=degrees, **call)
    assert max(errors) <= BAR


def test_groups_of_guidance_decide_each_for_itself(groups: Groups) -> None:
    answers = groups(4).run(f"{CASES}:groups_decide_for_themselves")
    assert answers == [[False, False], [False, False], [False, True], [False, True]]


@pytest.mark.parametrize("mode", ["voted", pytest.param("unvoted", marks=pytest.mark.sweep)])
def test_ranks_that_decide_without_asking_wait_for_one_another_for_ever(tmp_path: Path, mode: str) -> None:
    command = [sys.executable, "-m", "tests.engine.lone_ranks", mode, str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        _wait_for(tmp_path, ["0_decided", "1_decided"], START_SECONDS)
        if mode == "voted":
            _wait_for(tmp_path, ["0_done", "1_done"], WAIT_SECONDS)
            assert _log_of(tmp_path, "0_decided") == _log_of(tmp_path, "1_decided")
        else:
            time.sleep(WAIT_SECONDS)
            assert {_log_of(tmp_path, "0_decided"), _log_of(tmp_path, "1_decided")} == {"True", "False"}
            assert process.poll() is None
            assert not list(tmp_path.glob("*_done"))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _log_of(folder: Path, name: str) -> str:
    return (folder / name).read_text()


def _wait_for(folder: Path, names: list[str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < deadline, f"{names} within {seconds} s, there is {sorted(os.listdir(folder))}"
        time.sleep(0.05)
