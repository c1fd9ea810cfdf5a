"""A rank's share of the memory, counted on fake tensors at real width: activations fall with the number of ranks."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from ..comfyui.comfy import OUR_ROOT, find_comfy, why_there_is_none


def peaks(name: str, method: str, ranks: list[int]) -> dict[int, int]:
    comfy = find_comfy()
    if comfy is None:
        pytest.skip(why_there_is_none())
    command = [str(comfy.python), "-m", "tests.rows.fake", str(comfy.root), name, method, *map(str, ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=OUR_ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row["ranks"]: row["peak"] for row in rows}


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("FLUX 2048x2048", "decode"),
        pytest.param("FLUX 2048x2048", "encode", marks=pytest.mark.sweep),
        pytest.param("Wan 2.1 720x1280x81", "decode", marks=pytest.mark.sweep),
        pytest.param("Wan 2.2 704x1280x121", "decode", marks=pytest.mark.sweep),
        pytest.param("HunyuanVideo 720x1280x129", "decode", marks=pytest.mark.sweep),
        pytest.param("HunyuanVideo 1.5 720x1280x121", "decode", marks=pytest.mark.sweep),
        pytest.param("LTX 0.9.5 704x1280x121", "decode", marks=pytest.mark.sweep),
    ],
)
def test_activations_on_a_rank_are_its_share_and_a_tenth_at_most(name: str, method: str) -> None:
    full, *_ = measured = peaks(name, method, [1, 2, 4]).values()
    for ranks, peak in zip((1, 2, 4), measured, strict=True):
        assert peak <= (1 / ranks + 0.1) * full, ranks
