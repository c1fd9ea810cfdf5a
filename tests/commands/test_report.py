"""`python -m parallel_runtime report`, here on the CPU with a tiny network: facts, seconds and errors, row by row."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from parallel_runtime.commands import COMMANDS, report
from parallel_runtime.commands.report import in_a_line, placements
from parallel_runtime.errors import Refused

from ..comfyui.comfy import OUR_ROOT, find_comfy, why_there_is_none
from ..groups import faulty

EXACT = 1e-5


def reported(out: Path, *arguments: str, fault: str = "tape") -> tuple[list[dict], str, str]:
    """Its rows, its text, and what it said."""
    if (comfy := find_comfy()) is None:
        pytest.skip(why_there_is_none())
    line = [comfy.python, "-m", "parallel_runtime", "report", "--devices", "cpu", "--comfyui", comfy.root]
    done = subprocess.run(
        [*map(str, line), "--out", str(out), *arguments],
        cwd=OUR_ROOT, env=os.environ | faulty(fault), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, *lines = out.with_suffix(".jsonl").read_text().splitlines()
    assert "machine" in json.loads(first)
    return [json.loads(line) for line in lines], out.with_suffix(".md").read_text(), done.stdout


def test_both_divisions_over_two_workers_are_timed_and_equal_to_each_other(tmp_path: Path) -> None:
    (started, *steps), text, said = reported(tmp_path / "report", "--world", "2")
    assert started["what"] == "start of the workers"
    assert started["seconds"] > 0
    assert [row["degrees"] for row in steps] == ["ring 1 x Ulysses 2", "ring 2 x Ulysses 1"]
    assert all(row["seconds"] > 0 and row["gib"] > 0 and row["workers"] == 2 for row in steps)
    assert 0 < steps[1]["error"] <= EXACT
    assert all(row["degrees"] in text and row["degrees"] in said for row in steps)


@pytest.mark.sweep
def test_workers_that_fail_are_a_row_and_the_next_ones_are_measured(tmp_path: Path) -> None:
    (_, failed, _, *steps), text, _ = reported(tmp_path / "report", "--world", "2", "1", fault="1 evaluation raise")
    assert "sabotage" in failed["failed"]
    assert [row["degrees"] for row in steps] == ["ring 1 x Ulysses 1"]
    assert "FAILED: " in text


@pytest.fixture
def no_comfyui(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "find_comfyui", lambda _: "")


def main(*arguments: str) -> int:
    _, _, parsed = COMMANDS["report"]
    return report.main(parsed(["--devices", "cpu", *arguments]))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--world", "0"), "argument --world: starts at 1, got 0"),
        (("--world", "2", "-1"), "argument --world: starts at 1, got -1"),
        (("--world", "many"), "argument --world: invalid count value: 'many'"),
        (("--comfyui", "/nowhere"), "argument --comfyui: there is no ComfyUI in /nowhere"),
    ],
)
def test_arguments_that_cannot_be_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    with pytest.raises(SystemExit):
        main("--out", str(tmp_path / "report"), *arguments)
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_comfyui")
@pytest.mark.parametrize(
    ("name", "written"),
    [("h100-2.13", "h100-2.13"), ("report.md", "report"), ("report.jsonl", "report"), ("", "report")],
)
def test_it_is_written_under_the_name_that_was_told(tmp_path: Path, name: str, written: str) -> None:
    """A folder has it in it. Without a ComfyUI it has the facts of the machine."""
    assert main("--out", str(tmp_path / name)) == 0
    assert {path.name for path in tmp_path.iterdir()} == {f"{written}.md", f"{written}.jsonl"}
    text = (tmp_path / f"{written}.md").read_text()
    for fact in ("torch", "context-parallel-sampler", "cpu"):
        assert re.search(rf"^- {fact}: (?!None).+$", text, re.MULTILINE), fact
    assert "no ComfyUI here; --comfyui names its folder" in text


@pytest.mark.usefixtures("no_comfyui")
def test_a_place_that_cannot_be_written_is_said(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level("INFO")
    assert main("--out", str(tmp_path / "nowhere" / "report")) == 1
    assert "the report cannot be written" in caplog.text
    assert "--out names another place" in caplog.text


def test_more_workers_than_there_are_gpus_are_refused() -> None:
    with pytest.raises(Refused, match="--world 8 leaves nothing to run on 2 CUDA devices"):
        placements([8], 2)


@pytest.mark.parametrize(
    ("gpus", "devices"),
    [
        (0, ["cpu", "cpu cpu"]),
        (1, ["cuda:0", "cuda:0 cuda:0"]),
        (2, ["cuda:0", "cuda:0 cuda:1"]),
    ],
)
def test_one_gpu_is_also_tried_by_two_workers_on_it(gpus: int, devices: list[str]) -> None:
    assert [" ".join(placement.devices) for placement in placements([1, 2], gpus)] == devices


def test_a_figure_on_the_terminal_says_what_it_is() -> None:
    row = {"what": "FLUX", "mode": "eager", "error": 0.0, "ms": 12.1, "host_ms": 3.0, "faster": 1.5, "links": 20.0}
    assert in_a_line(row) == (
        "FLUX, eager, error 0.0e+00, 12.1 ms, 3 ms of the host, 1.50 x as fast as the first, 20.0 GB/s between workers"
    )
