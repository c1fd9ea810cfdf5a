"""The room for diffusers' transformers: what its page says runs, and it says which diffusers it was tested with."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers")

from parallel_runtime import demo, for_diffusers
from parallel_runtime.errors import Refused
from parallel_runtime.for_diffusers import attaching

from ..bench.report import command
from ..bench.report.measuring import Setting

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "parallel_runtime" / "for_diffusers"


def test_the_example_gives_on_two_ranks_what_one_gives() -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", "parallel_runtime.for_diffusers.example"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stderr.splitlines() if "largest difference" in line]
    assert line.startswith("2 ranks")
    assert 0 < float(line.split()[-3]) <= 1e-5


def test_the_page_names_all_that_the_room_offers() -> None:
    page = (FOLDER / "README.md").read_text()
    assert [name for name in for_diffusers.__all__ if f"`{name}" not in page] == []


def test_another_diffusers_than_the_tested_one_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    assert f"diffusers>={attaching.TESTED}." in (FOLDER / "requirements.txt").read_text()
    with caplog.at_level(logging.WARNING):
        for version in ("0.42.7", "0.43.0", "0.43.0"):
            attaching._warn_of_untested_version(version)
    assert [record.getMessage() for record in caplog.records] == [
        "[CP] attach was tested with diffusers 0.42, and 0.43.0 is installed"
    ]


def test_where_diffusers_is_missing_demo_and_report_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(Refused, match=f"-m pip install -r {FOLDER / 'requirements.txt'}$"):
        demo.check_diffusers()
    (part,) = (part for part in command.PARTS if part.name == "group")
    (row,) = command._measurements(part, Setting(kind="cpu", comfyui="", tokens=67), 60.0)
    assert str(row["note"]).startswith("no diffusers here; ")
