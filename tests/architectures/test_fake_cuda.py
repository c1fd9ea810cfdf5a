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
from ..zoo.calls import CASES

STEP = "a sampling step"
ROOT = Path(__file__).parents[2]
# What fake tensors cannot follow, undivided as divided, and in which words PyTorch says so.
OWN = {
    "hidream i1": "nonzero",  # counts the tokens of its experts on the host, in every block
    "hunyuan 3d 2.1": "bincount",  # so does this
    "wan context latents": "NVIDIA driver",  # a constant that it makes itself goes to a device that is not there
}

pytestmark = pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="NO CUDA: this PyTorch was built without it")


@pytest.fixture(scope="module")
def by_network(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Of every network that is asked for, and of a step: one process imports ComfyUI for all of them."""
    comfy = find_comfy()
    if comfy is None:
        pytest.skip(why_there_is_none())
    tests_of_file = [
        item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path
    ]
    names = [item.callspec.params["name"] if hasattr(item, "callspec") else STEP for item in tests_of_file]
    environment = {**os.environ, "COMFYUI_PATH": str(comfy.root), "OMP_NUM_THREADS": "1"}
    command = [str(comfy.python), "-m", "tests.architectures.fake_cuda", *names]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60 * len(names))
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(by_network: dict[str, Any]) -> None:
    alone, divided = (
        by_network["alone"],
        {degrees: waits for degrees, waits in by_network.items() if degrees != "alone"},
    )
    assert len(divided) == 10
    for degrees, waits in divided.items():
        assert "error" not in waits, f"{degrees}: {waits}"
        assert waits["inside"] == [], degrees
        assert set(waits["outside"]) <= set(alone["outside"]), f"{degrees}: more than the undivided network's own"


@pytest.mark.sweep(one_in=17)
@pytest.mark.parametrize("name", [name for name in CASES if name not in OWN])
def test_a_network_stays_on_the_device_and_waits_for_nothing_inside_its_blocks(
    by_network: dict[str, Any], name: str
) -> None:
    check(by_network[name])


@pytest.mark.sweep
@pytest.mark.parametrize("name", OWN)
def test_those_that_wait_by_themselves_do_so_undivided(by_network: dict[str, Any], name: str) -> None:
    assert OWN[name] in by_network[name]["alone"]["error"]


def test_a_guided_step_of_comfyuis_loop_stays_on_the_device(by_network: dict[str, Any]) -> None:
    assert any("samplers.py" in line for line in by_network[STEP]["alone"]["outside"]), "who waits is not seen"
    check(by_network[STEP])
