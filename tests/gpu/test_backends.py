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

from .backend_cases import RANKS, Case, cases

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
EXACT = 1e-5
OF_ONE_PROCESS = 2.0  # a block's output is rounded before it is merged


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("backends")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [*launch, "-m", "tests.gpu.backend_ranks", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "errors.json").read_text())
    return found


@pytest.mark.parametrize("case", cases(), ids=str)
def test_two_ranks_on_one_card_lose_no_more_than_one_process(errors: dict[str, Any], case: Case) -> None:
    found = errors[str(case)]
    if isinstance(found, str):
        pytest.skip(f"{case.backend} is not here: {found}")
    ours, alone = found
    assert ours <= max(EXACT, OF_ONE_PROCESS * alone)
