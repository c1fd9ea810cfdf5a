"""ComfyUI's networks on fake "cuda" tensors: no device is mixed up, and in blocks nobody waits for the device."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from ..comfyui.comfy import find_comfy, why_there_is_none
from .zoo import CASES

ROOT = Path(__file__).parents[2]
# What fake tensors cannot follow, undivided as divided, and in which words PyTorch says so.
OWN = {
    "hidream i1": "nonzero",  # counts the tokens of its experts on the host, in every block
    "wan context latents": "NVIDIA driver",  # a constant that it makes itself goes to a device that is not there
}

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="NO CUDA: this PyTorch was built without it")


def runs(name: str) -> dict[str, Any]:
    comfy = find_comfy()
    if comfy is None:
        pytest.skip(why_there_is_none())
    environment = {**os.environ, "COMFYUI_PATH": str(comfy.root), "OMP_NUM_THREADS": "1"}
    command = [str(comfy.python), "-m", "tests.networks.fake_cuda", name]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])[name]


def check(found: dict[str, Any]) -> None:
    alone = found.pop("alone")
    assert len(found) == 10
    for degrees, waits in found.items():
        assert "error" not in waits, f"{degrees}: {waits}"
        assert waits["inside"] == [], degrees
        assert set(waits["outside"]) <= set(alone["outside"]), f"{degrees}: more than the undivided network's own"


@pytest.mark.sweep(one_in=17)
@pytest.mark.parametrize("name", [name for name in CASES if name not in OWN])
def test_a_network_stays_on_the_device_and_waits_for_nothing_inside_its_blocks(name: str) -> None:
    check(runs(name))


@pytest.mark.sweep
@pytest.mark.parametrize("name", OWN)
def test_those_that_wait_by_themselves_do_so_undivided(name: str) -> None:
    assert OWN[name] in runs(name)["alone"]["error"]


def test_a_guided_step_of_comfyuis_loop_stays_on_the_device() -> None:
    found = runs("a sampling step")
    assert any("samplers.py" in line for line in found["alone"]["outside"]), "who waits is not seen"
    check(found)
