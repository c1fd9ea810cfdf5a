"""The parts of the developers' report, here on CPU ranks and at tiny size: whole, exact, and told row by row."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import uuid
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from parallel_runtime.errors import Refused

from ..comfyui.comfy import find_comfy
from ..comfyui.processes import MARK, marked_processes, wait_until_none
from ..gpu.page_locks import offloaded
from ..gpu.recordings import Span, summed
from ..gpu.recordings import degrees as recorded_degrees
from ..groups import faulty, wait_until
from .report import attention_cases
from .report.command import PARTS, main, planned, seconds_for
from .report.measuring import Setting
from .report.part import measurements_of

ROOT = Path(__file__).parents[2]
EXACT = 1e-5
BF16 = 0.02  # the ranks' sums are rounded elsewhere than one process's
Rows = dict[str, list[dict[str, Any]]]  # by the title of their part


def reported(folder: Path, *arguments: str, fault: str) -> tuple[Rows, str, str]:
    """Its rows, its text, and what it said."""
    comfy = find_comfy()
    python = comfy.python if comfy else sys.executable
    command = [python, "-m", "tests.bench.report", "--devices", "cpu", "--world", "2", "--tokens", "67"]
    place = {"COMFYUI_PATH": str(comfy.root)} if comfy else {}
    done = subprocess.run(
        [*map(str, command), "--out", str(folder / "report"), *arguments],
        cwd=ROOT, env=os.environ | place | faulty(fault), capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, *lines = (folder / "report.jsonl").read_text().splitlines()
    assert "machine" in json.loads(first)
    sections: Rows = defaultdict(list)
    for row in map(json.loads, lines):
        sections[row["section"].partition(":")[0]].append(row)
    return sections, (folder / "report.md").read_text(), done.stdout


@pytest.mark.sweep
def test_the_report_is_whole_and_exact(tmp_path: Path) -> None:
    sections, text, log_text = reported(tmp_path, "--minutes", "60", fault="tape")  # a busy machine is slow
    assert not [row for rows in sections.values() for row in rows if "failed" in row]
    pools, recordings, locks, attention, group, networks, vae, share, theirs = sections.values()
    assert [row["note"] for row in (*pools, *locks)] == ["no CUDA graphs here", "needs a CUDA GPU"]
    errors = {row["degrees"]: row["error"] for row in attention if row["what"] == "auto"}
    assert {"ring 2 x Ulysses 1", "ring 2 x Ulysses 1, allgather", "ring 1 x Ulysses 2"} <= errors.keys()
    assert max(errors.values()) <= EXACT
    assert [row["what"] for row in group][:2] == ["start of the group", "first run, with loading"]
    assert all(row["gib"] > 0 for row in group)
    assert {row["degrees"] for row in theirs} >= {"1 rank", "Ulysses 8", "ring 8"}
    assert all(row["what"] in text for row in (*attention, *group))
    assert [row["what"] for row in group if "while it records" in row["what"] and "note" not in row]
    assert "[4 of 9] Attention against float64: 2 ranks; about" in log_text
    if find_comfy() is None:
        assert {row["note"] for row in (*recordings, *networks, *vae, *share)} == {
            "no ComfyUI here; --comfyui names its folder"
        }
        return
    check_recordings(recordings)
    check_networks(networks)
    assert {(row["what"].partition(",")[0], row["workers"]) for row in vae} >= {("FLUX's VAE", 2), ("Wan's VAE", 1)}
    assert max(row["error"] for row in vae if "error" in row) <= EXACT
    check_shares(share)


def check_recordings(rows: list[dict[str, Any]]) -> None:
    notes = {(row["what"], row["degrees"], row["mode"]): row.get("note", "") for row in rows}
    for network in ("FLUX, tiny", "Wan, tiny"):
        for degrees in ("ring 1 x Ulysses 2", "ring 2 x Ulysses 1"):
            assert notes[network, degrees, "auto"] == "recorded, 16 replays"
            assert notes[network, degrees, "one replay"] == "needs a CUDA GPU"
            assert (network, degrees, "replays") in notes
    assert max(row["error"] for row in rows if "error" in row) == 0


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
        for degrees in ("1 rank", *(f"{kind} {world}" for kind in ("Ulysses", "ring") for world in (2, 4, 8))):
            assert modes[network, degrees, "eager"]["host_ms"] > 0
            assert modes[network, degrees, "recorded"]["faster"] > 0
        assert modes[network, "Ulysses 8", "compiled and recorded"]["note"] == "no CUDA graphs here"


def test_every_part_has_its_module() -> None:
    assert [part.module for part in PARTS if importlib.util.find_spec(part.module) is None] == []


def test_parts_that_are_named_are_all_that_is_reported_and_a_case_that_fails_is_a_row(tmp_path: Path) -> None:
    parts = ["graph_pools", "page_locks", "attention"]
    rows, text, output = reported(tmp_path, "--minutes", "60", "--only", *parts, fault="tape;1 report raise")
    pools, locks, attention = rows.values()
    assert [row["note"] for row in (*pools, *locks)] == ["no CUDA graphs here", "needs a CUDA GPU"]
    assert [row.get("failed") for row in attention].count("on another rank") == 1
    assert len([row for row in attention if row.get("error", 1) <= EXACT]) == len(attention) - 1 > 5
    assert all(row["what"] in text for row in attention)
    assert "FAILED: on another rank" in text
    assert "[3 of 3] Attention against float64: 2 ranks; about" in output


def test_a_part_that_is_cut_off_keeps_what_it_found(tmp_path: Path) -> None:
    sections, _, log_text = reported(tmp_path, "--only", "attention", fault="1 report SIGKILL")
    *kept, last = sections["Attention against float64"]
    assert len(kept) == 2
    assert last["what"] == "the rest of this part"
    assert "rank 1 with -9" in last["failed"]
    assert all(row["degrees"] in log_text for row in kept)


def test_what_there_is_no_time_for_is_said(tmp_path: Path) -> None:
    sections, *_ = reported(tmp_path, "--minutes", "0", fault="tape")
    notes = [row["note"] for rows in sections.values() for row in rows]
    assert len(notes) == 9
    assert any(note.startswith("its share of time is too short") for note in notes)


def test_a_part_whose_time_is_over_was_not_measured_and_has_not_failed() -> None:
    setting = Setting(kind="cpu", tokens=67)
    (row,) = measurements_of(attention_cases.__name__, setting, processes=1, seconds=0.1)
    assert row["what"] == "the rest of this part"
    assert row["note"].startswith("not measured for lack of time: it was given 0 s")


@pytest.mark.sweep
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT], ids=lambda how: how.name)
def test_no_rank_outlives_a_report_that_was_ended(tmp_path: Path, how: signal.Signals) -> None:
    mark, lines = uuid.uuid4().hex, tmp_path / "report.jsonl"
    command = [sys.executable, "-m", "tests.bench.report", "--devices", "cpu", "--only", "attention"]
    report = subprocess.Popen(
        [*command, "--world", "2", "--tokens", "67", "--minutes", "60", "--out", str(tmp_path / "report")],
        cwd=ROOT, env=os.environ | faulty("1 report SIGSTOP") | {MARK: mark}, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what runs in the background ignores it
    )  # fmt: skip
    try:
        wait_until(lambda: lines.exists() and len(lines.read_text().splitlines()) == 3, 300)
        report.send_signal(how)
        output, _ = report.communicate(timeout=60)
        assert wait_until_none(mark, 5) == []
        assert report.returncode == (1 if how == signal.SIGINT else -how)
        assert ("stopped; results so far are in" in output) == (how == signal.SIGINT)
    finally:
        for process in marked_processes(mark):
            process.kill()


BRIEF = ("--devices", "cpu", "--only", "attention", "--minutes", "0")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--tokens", "-3"), "argument --tokens: starts at 1, got -3"),
        (("--tokens", "many"), "argument --tokens: invalid count value: 'many'"),
        (("--minutes", "nan"), "argument --minutes: nan is no length of time"),
        (("--minutes", "-5"), "argument --minutes: -5 is no length of time"),
    ],
)
def test_arguments_that_cannot_be_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    with pytest.raises(SystemExit):
        main([*BRIEF, "--out", str(tmp_path / "report"), *arguments])
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_more_ranks_than_there_are_gpus_are_refused() -> None:
    options = argparse.Namespace(devices="cuda", comfyui="", tokens=4608, world=[8], only=["group"])
    with pytest.raises(Refused, match="--world 8 leaves nothing to run on 2 CUDA devices"):
        list(planned(options, 2))


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
    assert [(setting.world_size, setting.one_card) for _, setting in planned(options, gpus)] == ranks


def test_what_nobody_has_measured_yet_comes_first_and_two_communicators_with_both_ways_of_buffers() -> None:
    options = argparse.Namespace(devices="cuda", comfyui="", tokens=4608, world=[1, 2, 4, 8], only=None)
    parts = list(planned(options, 1))
    assert list(dict.fromkeys(part.name for part, _ in parts))[:4] == [
        "graph_pools",
        "recordings",
        "page_locks",
        "attention",
    ]
    recorded = [(each.world_size, each.one_card, each.registered) for part, each in parts if part.name == "recordings"]
    assert recorded == [(1, False, False), (2, True, False), (4, True, False), (4, True, True)]
    (both,) = recorded_degrees(4)
    assert (both[1].ring_degree, both[1].ulysses_degree) == (2, 2)


def test_a_replay_is_summed_by_kinds_of_kernels_and_by_what_lies_between_them() -> None:
    """Kernels of two streams at once are no more time."""
    spans = [
        Span("CatArrayBatchedCopy", 1000, 2000),
        Span("ncclDevKernel_SendRecv", 1500, 4000),
        Span("nvjet_hsh_128x256", 6000, 9000),
        Span("Memcpy DtoD", 2000, 2500),
        Span("elementwise_kernel", 6500, 7000),
    ]
    row = summed(spans)
    assert row["ms"] == 8.0
    assert row["note"] == (
        "2 ms of it without a kernel; NCCL 1 in 2.5 ms, packing by cat 1 in 1 ms, copies 1 in 0.5 ms, "
        "products 1 in 3 ms, others 1 in 0.5 ms"
    )
    assert summed([])["note"] == "the profiler saw nothing on the device"


def test_offload_is_exact_where_its_rows_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    row = offloaded(torch.device("cpu"), locks=True, width=64)
    assert row["error"] == 0
    assert row["ms"] > 0


def test_a_part_that_is_alone_has_all_of_the_time() -> None:
    options = argparse.Namespace(devices="cuda", comfyui="", tokens=4608, world=[1], only=["attention", "group"])
    left = list(planned(options, 2))
    assert [part.name for part, _ in left] == ["attention", "group"]
    assert seconds_for(left[1:], 60.0, 1) == 60.0
    assert seconds_for(left, 60.0, 1) < 20 < seconds_for(left[:1], 60.0, 1) == 60.0
    assert seconds_for(left, 600.0, 10) == pytest.approx(600 * 25 / 95), "what others do not need"
    assert seconds_for(left, 95.0, 10) == 75.0, "not all that there is, for others come after it"
