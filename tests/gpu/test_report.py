"""The report for people with GPUs runs whole, here on CPU ranks and at tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers")

ROOT = Path(__file__).parents[2]


def test_the_report_is_whole_and_exact(tmp_path: Path) -> None:
    tiny = ["--devices", "cpu", "--world", "2", "--tokens", "67", "--out", str(tmp_path / "report")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.report", *tiny], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    (attention,) = found["attention"]
    assert (attention["world"], attention["failure"]) == (2, "")
    of_two = {row["what"]: row["error"] for row in attention["rows"]}
    for way in ("ring 2 x Ulysses 1, alltoall", "ring 2 x Ulysses 1, allgather", "ring 1 x Ulysses 2, alltoall"):
        assert of_two[f"auto, {way}"] <= 1e-5
    (group,) = found["group"]
    assert (group["world"], group["failure"]) == (2, "")
    assert {"run that is cancelled in its first steps", "start of another group, and a run"} <= {
        row["what"] for row in group["rows"]
    }
    check_networks(found["networks"])
    text = (tmp_path / "report.md").read_text()
    assert all(what in text for what in of_two)
    assert f"torch: {found['machine']['torch']}" in text


def check_networks(found: list[dict[str, Any]] | str) -> None:
    """In bfloat16 the ranks' sums are rounded elsewhere than one process's."""
    if isinstance(found, str):
        assert "NO COMFYUI" in found
        return
    (part,) = found
    assert (part["world"], part["failure"]) == (2, "")
    rows = {(row["what"], row["weights"], row["degrees"]): row["error"] for row in part["rows"]}
    for network in ("FLUX, tiny", "Wan, tiny"):
        for weights in ("bfloat16", "float8_e4m3fn"):
            assert rows[network, weights, "ring 2 x Ulysses 1, alltoall"] <= 0.02
            ulysses = "ring 1 x Ulysses 2, alltoall"
            whole, *elsewhere = (rows[network, weights, ulysses + how] for how in ("", ", shard", ", offload"))
            assert whole <= 0.02
            assert elsewhere == [whole] * 2
