"""The report for people with GPUs, here on CPU ranks and at tiny size: whole, exact, and told row by row."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers")

from parallel_runtime.report.command import planned, seconds_for
from parallel_runtime.report.page import in_a_line

from .comfyui.comfy import find_comfy
from .groups import faulty

ROOT = Path(__file__).parents[1]
EXACT = 1e-5
BF16 = 0.02  # the ranks' sums are rounded elsewhere than one process's
Rows = dict[str, list[dict[str, Any]]]  # by the title of their part


def reported(folder: Path, *arguments: str, fault: str) -> tuple[Rows, str, str]:
    """Its rows, its text, and what it said."""
    comfy = find_comfy()
    python = comfy.python if comfy else sys.executable
    command = [python, "-m", "parallel_runtime", "report", "--devices", "cpu", "--world", "2", "--tokens", "67"]
    place = {"COMFYUI_PATH": str(comfy.root)} if comfy else {}
    done = subprocess.run(
        [*map(str, command), "--out", str(folder / "report"), *arguments],
        cwd=ROOT, env=os.environ | place | faulty(fault), capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, *lines = (folder / "report.jsonl").read_text().splitlines()
    assert "machine" in json.loads(first)
    found: Rows = defaultdict(list)
    for row in map(json.loads, lines):
        found[row["section"].partition(":")[0]].append(row)
    return found, (folder / "report.md").read_text(), done.stdout


def test_the_report_is_whole_and_exact(tmp_path: Path) -> None:
    found, text, said = reported(tmp_path, "--minutes", "60", fault="tape")  # a busy machine is slow
    assert not [row for rows in found.values() for row in rows if "failed" in row]
    attention, group, networks, vae, share, theirs = found.values()
    ways = {row["degrees"]: row["error"] for row in attention if row["what"] == "auto"}
    assert {"ring 2 x Ulysses 1", "ring 2 x Ulysses 1, allgather", "ring 1 x Ulysses 2"} <= ways.keys()
    assert max(ways.values()) <= EXACT
    assert [row["what"] for row in group][:2] == ["start of the group", "first run, with loading"]
    assert all(row["gib"] > 0 for row in group)
    assert {row["degrees"] for row in theirs} >= {"1 rank", "Ulysses 8", "ring 8"}
    assert all(row["what"] in text for row in (*attention, *group))
    assert "[1 of 6] Attention against float64: 2 ranks; what is left takes about" in said
    if find_comfy() is None:
        assert {row["note"] for row in (*networks, *vae, *share)} == {"no ComfyUI here; --comfyui names its folder"}
        return
    check_networks(networks)
    assert {(row["what"].partition(",")[0], row["workers"]) for row in vae} >= {("FLUX's VAE", 2), ("Wan's VAE", 1)}
    assert max(row["error"] for row in vae if "error" in row) <= EXACT
    check_shares(share)


def check_networks(rows: list[dict[str, Any]]) -> None:
    errors = {(row["what"], row["weights"], row["degrees"]): row["error"] for row in rows}
    for network in ("FLUX, tiny", "Wan, tiny"):
        for weights in ("bfloat16", "float8_e4m3fn"):
            assert errors[network, weights, "ring 2 x Ulysses 1"] <= BF16
            whole, *elsewhere = (
                errors[network, weights, f"ring 1 x Ulysses 2{how}"] for how in ("", ", shard", ", offload")
            )
            assert whole <= BF16
            assert elsewhere == [whole] * 2


def check_shares(rows: list[dict[str, Any]]) -> None:
    """Eager and recorded at 1, 2, 4 and 8 ranks; nothing is compiled for a CPU."""
    modes = {(row["what"], row["degrees"], row["mode"]): row for row in rows}
    for network in ("FLUX, tiny", "Wan, tiny"):
        for degrees in ("1 rank", *(f"{way} {world}" for way in ("Ulysses", "ring") for world in (2, 4, 8))):
            assert modes[network, degrees, "eager"]["host_ms"] > 0
            assert modes[network, degrees, "recorded"]["faster"] > 0
        assert modes[network, "Ulysses 8", "compiled and recorded"]["note"] == "no CUDA graphs here"


def test_a_figure_on_the_terminal_says_what_it_is() -> None:
    row = {"what": "FLUX", "mode": "eager", "error": 0.0, "ms": 12.1, "host_ms": 3.0, "faster": 1.5, "graph_gib": 0.5}
    assert in_a_line(row) == (
        "FLUX, eager, error 0.0e+00, 12.1 ms, 3 ms of the host, 1.50 x as fast as the first, 0.50 GiB of a graph"
    )


def test_a_case_that_fails_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    found, text, _ = reported(tmp_path, "--only", "attention", fault="1 report raise")
    (rows,) = found.values()
    assert [row.get("failed") for row in rows].count("on another rank") == 1
    assert len([row for row in rows if row.get("error", 1) <= EXACT]) == len(rows) - 1 > 5
    assert "FAILED: on another rank" in text


def test_a_part_that_is_cut_off_keeps_what_it_found(tmp_path: Path) -> None:
    found, _, said = reported(tmp_path, "--only", "attention", fault="1 report SIGKILL")
    *kept, last = found["Attention against float64"]
    assert len(kept) == 2
    assert last["what"] == "the rest of this part"
    assert "rank 1 with -9" in last["failed"]
    assert all(row["degrees"] in said for row in kept)


def test_what_there_is_no_time_for_is_said(tmp_path: Path) -> None:
    found, *_ = reported(tmp_path, "--minutes", "0", fault="tape")
    notes = [row["note"] for rows in found.values() for row in rows]
    assert len(notes) == 6
    assert any(note.startswith("the time is over") for note in notes)


@pytest.mark.parametrize(
    ("gpus", "ranks"),
    [
        (1, [(1, False), (2, True), (4, True)]),
        (2, [(1, False), (2, False)]),
        (8, [(1, False), (2, False), (4, False), (8, False)]),
    ],
)
def test_one_gpu_is_also_tried_by_several_ranks_on_it(gpus: int, ranks: list[tuple[int, bool]]) -> None:
    options = argparse.Namespace(devices="cuda", comfyui="", tokens=4608, world=[1, 2, 4, 8], only=["attention"])
    assert [(setting.world, setting.one_card) for _, setting in planned(options, gpus)] == ranks


def test_a_part_that_is_alone_has_all_of_the_time() -> None:
    options = argparse.Namespace(devices="cuda", comfyui="", tokens=4608, world=[1], only=["attention", "group"])
    left = list(planned(options, 2))
    assert [part.name for part, _ in left] == ["attention", "group"]
    assert seconds_for(left[1:], 60.0, 1) == 60.0
    assert seconds_for(left, 60.0, 1) < 20 < seconds_for(left[:1], 60.0, 1) == 60.0
    assert seconds_for(left, 600.0, 10) == pytest.approx(600 * 25 / 95), "what others do not need"
    assert seconds_for(left, 95.0, 10) == 75.0, "not all that there is, for others come after it"
