"""Each family computes the same on three ranks as on one: sizes that do not divide, batches, masks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers")

from ..tiny import TINY
from .parallel_cases import cases

ROOT = Path(__file__).parents[2]
EXACT = 1e-5
CASES = [f"{name} {case} {mode}" for name in TINY for case in cases(name) for mode in ("ring", "ulysses")]


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    folder = tmp_path_factory.mktemp("parallel")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command = [*launch, "-m", "tests.families.parallel_ranks", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, float] = json.loads((folder / "differences.json").read_text())
    return found


@pytest.mark.parametrize("case", CASES)
def test_three_ranks_compute_what_one_computes(differences: dict[str, float], case: str) -> None:
    assert differences[case] <= EXACT
