"""Each attention backend on a real card, two ranks sharing it over gloo: no worse than one process, against float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers")

from ..groups import faulty
from .backend_cases import RANKS, Case, cases

ROOT = Path(__file__).parents[2]
EXACT = 1e-5
OF_ONE_PROCESS = 2.0  # a block's output is rounded before it is merged


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tried(tmp_path_factory.mktemp("backends"), "cuda", {})


def tried(folder: Path, device: str, fault: dict[str, str]) -> dict[str, Any]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [*launch, "-m", "tests.gpu.backend_ranks", str(folder), device]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **fault}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    errors_by_case: dict[str, Any] = json.loads((folder / "errors.json").read_text())
    return errors_by_case


@pytest.mark.gpu
@pytest.mark.parametrize("case", cases(), ids=str)
def test_two_ranks_on_one_card_lose_no_more_than_one_process(errors: dict[str, Any], case: Case) -> None:
    errors_by_case = errors[str(case)]
    if "missing" in errors_by_case:
        pytest.skip(f"{case.backend} is not here: {errors_by_case['missing']}")
    assert "failed" not in errors_by_case
    assert errors_by_case["error"] <= max(EXACT, OF_ONE_PROCESS * errors_by_case["alone"])


@pytest.mark.sweep
def test_a_case_that_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    errors_by_case = tried(tmp_path, "cpu", faulty(";".join(f"{rank} attend raise" for rank in range(RANKS))))
    tried_cases = {name: row for name, row in errors_by_case.items() if "missing" not in row}
    assert [row["failed"] for row in tried_cases.values() if "failed" in row] == ["RuntimeError: sabotage"]
    assert all(
        row["error"] <= max(EXACT, OF_ONE_PROCESS * row["alone"]) for row in tried_cases.values() if "error" in row
    )
    assert len(tried_cases) > 8
