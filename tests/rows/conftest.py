"""One process in ComfyUI's python that holds tiny VAEs; without a ComfyUI these tests skip."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ..comfyui.comfy import OUR_ROOT, find_comfy, why_there_is_none
from ..engine.conftest import Group, Groups, Ranks

LIMIT = 150.0
UNET_CASES = "tests.rows.unet_cases"
CONTROL_CASES = "tests.rows.control_cases"
CASCADE_CASES = "tests.rows.cascade_cases"
Divided = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def divided() -> Iterator[Divided]:
    """Run a case of the zoo whole and divided: (name, method, dim, ranks, **options) to what cases.run returns."""
    comfy = find_comfy()
    if comfy is None:
        pytest.skip(why_there_is_none())
    process = subprocess.Popen(
        [str(comfy.python), "-m", "tests.rows.ranks", str(comfy.root)],
        cwd=OUR_ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def ask(name: str, method: str, dim: int, ranks: int, **options: Any) -> dict[str, Any]:
        process.stdin.write(json.dumps([name, method, dim, ranks, options]).encode() + b"\n")
        process.stdin.flush()
        if not select.select([process.stdout], [], [], LIMIT)[0]:
            raise TimeoutError(f"{name} gave no answer in {LIMIT:.0f} s")
        answer = json.loads(process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer["value"]

    yield ask
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="session")
def unets() -> Iterator[Groups]:
    """Ranks that run ComfyUI's UNets, in ComfyUI's python."""
    comfy = find_comfy()
    if comfy is None:
        pytest.skip(why_there_is_none())
    ranks = Ranks(comfy.python, [UNET_CASES, CONTROL_CASES, CASCADE_CASES], {"COMFYUI_PATH": str(comfy.root)})
    yield lambda world: Group(ranks, world)
    ranks.close()
