"""What the page is told under /cp, and what it may ask for there, of a real server with real workers."""

from __future__ import annotations

import json
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .client import Interrupted, NodeError
from .comfy import OUR_ROOT
from .graphs import Job, Parallel, longer, sampling_graph
from .server import Server

FLUX = Job(family="flux_dev", cfg=2.0)
LONG = longer(FLUX, steps=2000)
TWO = Parallel(ulysses_degree=2)
START_SECONDS = 90
SEEN_SECONDS = 2  # a dead worker is shown within


def status(server: Server) -> dict[str, Any]:
    return server.client.get("/api/cp/status")


def status_when(server: Server, wanted: Callable[[dict[str, Any]], bool], seconds: float = 20) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    while not wanted(now := status(server)):
        assert time.monotonic() < deadline, f"{now['state']} after {seconds} s: {now}"
        time.sleep(0.05)
    return now


def start_a_long_run(server: Server) -> tuple[str, int]:
    since = server.client.now()
    prompt = server.client.queue(sampling_graph(LONG, "CPSampler", TWO))
    server.client.wait_for_step(3, since=since)
    return prompt, since


def test_a_run_is_followed_from_its_start_to_idle(server: Server) -> None:
    prompt, since = start_a_long_run(server)

    def beats(now: dict[str, Any]) -> bool:
        return now["state"] == "sampling" and all(rank["used_bytes"] for rank in now["ranks"])

    first = status_when(server, lambda now: beats(now) and now["ranks"][1]["step_seconds"] is not None)
    assert first["steps"] == LONG.steps
    assert first["text"] == f"step {first['step']} of {LONG.steps}"
    assert first["degrees"] == {
        "ring_degree": 1,
        "ulysses_degree": 2,
        "cfg_degree": 1,
        "data_degree": 1,
        "pipeline_degree": 1,
    }
    assert [(rank["rank"], rank["device"]) for rank in first["ranks"]] == [(0, "cpu"), (1, "cpu")]
    for rank in first["ranks"]:
        assert 50e6 < rank["used_bytes"] < rank["total_bytes"]
        assert 0 < rank["step_seconds"] < 30
        assert 0 < rank["waited_seconds"] < rank["step_seconds"]
        model = next(model for model in rank["weights"] if model["model"] == "flux_dev.safetensors")
        assert model["resident"] + model["fetched"] > 1e6
    status_when(server, lambda now: now["step"] > first["step"])
    states = [event.data["state"] for event in server.client.events(since) if event.kind == "cp.status"]
    assert "loading" not in states[states.index("sampling") :], "it may be too short to be seen, but comes first"
    server.client.interrupt(prompt)
    with pytest.raises(Interrupted):
        server.client.finish(prompt, since=since)
    status_when(server, lambda now: now["state"] == "cancelled")
    server.client.run(sampling_graph(FLUX, "CPSampler", TWO))
    last = status_when(server, lambda now: now["state"] == "idle")
    assert last["loaded"] == 1
    assert [run["end"] for run in last["runs"]][-2:] == ["cancelled", "idle"]
    assert last["runs"][-1]["step_seconds"] > 0
    assert {"loading", "sampling"} <= dict(last["runs"][-1]["phases"]).keys()
    page = (OUR_ROOT / "docs" / "scripts.md").read_text()
    assert [name for name in (*last, *last["ranks"][0], *last["runs"][0]) if f"`{name}`" not in page] == []
    assert {"keys", "replays", "bytes"} <= last["ranks"][0]["graphs"].keys()


def test_stop_cancels_the_run_and_keeps_the_workers(server: Server) -> None:
    prompt, since = start_a_long_run(server)
    before = server.workers()
    assert server.client.post("/cp/stop") == {"stopped": True}
    with pytest.raises(Interrupted):
        server.client.finish(prompt, since=since)
    assert {rank: process.pid for rank, process in server.workers().items()} == {
        rank: process.pid for rank, process in before.items()
    }
    with pytest.raises(NodeError, match="no run uses the workers"):
        server.client.post("/cp/stop")


def test_free_empties_the_workers_and_the_next_run_is_the_same(server: Server) -> None:
    server.client.run(sampling_graph(FLUX, "CPSampler", TWO))
    assert [len(rank["weights"]) for rank in status(server)["ranks"]] >= [1, 1]
    assert "flux_dev.safetensors" in server.client.post("/api/cp/free")["freed"]
    assert [rank["weights"] for rank in status(server)["ranks"]] == [[], []]
    server.client.run(sampling_graph(FLUX, "CPSampler", TWO))
    assert [model["model"] for model in status(server)["ranks"][1]["weights"]] == ["flux_dev.safetensors"]


def test_cp_clip_pays_for_a_text_encoder_of_more_than_four_gigabytes(server: Server) -> None:
    folder = server.base / "models" / "text_encoders"
    folder.mkdir(exist_ok=True)
    for name, size in (("small", 10**9), ("half", 3 * 10**9)):
        (folder / f"{name}.safetensors").touch()
        os.truncate(folder / f"{name}.safetensors", size)  # takes no room on the disk
    (server.base / "models" / "diffusion_models").mkdir(exist_ok=True)
    (server.base / "models" / "diffusion_models" / "vast.safetensors").touch()
    os.truncate(server.base / "models" / "diffusion_models" / "vast.safetensors", 10**13)

    def pays(*names: str, beside: str = "") -> bool:
        query = "&".join([*(f"clip={name}.safetensors" for name in names), *([f"model={beside}"] if beside else [])])
        return bool(server.client.get(f"/cp/encoder?{query}")["pays"])

    try:
        assert not pays("half")
        assert pays("half", "half")
        assert not pays("none")
        assert pays("small", beside="vast.safetensors"), "no room on ComfyUI's device"
        assert not pays("../../../../etc/passwd", beside="vast.safetensors")
    finally:
        (server.base / "models" / "diffusion_models" / "vast.safetensors").unlink()
        for name in ("small", "half"):
            (folder / f"{name}.safetensors").unlink()


def test_restart_ends_a_run_with_the_reason_and_brings_new_workers(server: Server) -> None:
    prompt, since = start_a_long_run(server)
    before = {process.pid for process in server.workers().values()}
    assert server.client.post("/cp/restart") == {"restarted": True}
    with pytest.raises(NodeError, match="restarted from the panel"):
        server.client.finish(prompt, since=since)
    status_when(server, lambda now: now["state"] == "starting", START_SECONDS)
    assert server.client.post("/cp/restart") == {"restarted": True}, "they are starting already"
    status_when(server, lambda now: now["state"] == "idle", START_SECONDS)
    after = {process.pid for process in server.workers().values()}
    assert len(after) == 2
    assert not after & before
    server.client.run(sampling_graph(FLUX, "CPSampler", TWO))
    assert {process.pid for process in server.workers().values()} == after


@pytest.mark.parametrize(
    "idle", [pytest.param(True, id="idle"), pytest.param(False, id="in a run", marks=pytest.mark.sweep)]
)
@pytest.mark.sweep(one_in=2)
def test_a_killed_worker_is_shown_at_once_with_the_cause(server: Server, idle: bool) -> None:
    server.client.run(sampling_graph(FLUX, "CPSampler", TWO))
    if not idle:
        start_a_long_run(server)
    server.workers()[1].kill()
    killed = time.monotonic()
    died = status_when(server, lambda now: now["state"] == "died", SEEN_SECONDS)
    assert time.monotonic() - killed < SEEN_SECONDS
    assert died["reason"].startswith("worker rank 1 ")
    died = status_when(server, lambda now: now["reason"].startswith("worker rank 1 (cpu) was killed by SIGKILL"))
    assert (died["loss"]["rank"], died["loss"]["settled"]) == (1, True)
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/cp/help/{died['help']}", timeout=10) as page:
        assert page.read().startswith(b"# A worker was killed")
    server.client.settle()
    server.client.run(sampling_graph(FLUX, "CPSampler", TWO))
    assert status(server)["state"] == "idle"
    assert status(server)["reason"] == ""


def test_the_log_is_told_by_rank_and_holds_no_secret(server: Server) -> None:
    server.client.run(sampling_graph(FLUX, "CPSampler", TWO))
    token = _environment(server.workers()[0].pid)["CP_TOKEN"]
    lines = server.client.get("/cp/logs")["lines"]
    assert any("sampled in" in line["text"] for line in lines)
    assert all(line["rank"] == 1 for line in server.client.get("/cp/logs?rank=1")["lines"])
    assert len(server.client.get("/cp/logs?lines=1")["lines"]) == 1
    text = json.dumps([lines, status(server)])
    assert token not in text
    assert str(server.base) not in json.dumps(status(server)), "a folder's name"


def test_a_config_is_checked_as_the_sampler_would(server: Server) -> None:
    good = server.client.post("/cp/check", ring_degree=2, ulysses_degree=2, devices="cpu,cpu,cpu,cpu")
    assert (good["workers"], good["reason"]) == (4, "")
    assert list(good["degrees"].values()) == [2, 2, 1, 1, 1]
    bad = server.client.post("/cp/check", ring_degree=3, ulysses_degree=1, devices="cpu,cpu")
    assert "ring_degree 3" in bad["reason"]
    assert bad["fix"] == [{"name": "ring_degree", "value": 2, "automatic": False}]
    for name, value, reason in (
        ("ring_degree", "three", "ring_degree 'three' is not a whole number"),
        ("ring_degree", True, "ring_degree True is not a whole number"),
        ("rotate_method", "zig", "rotate_method 'zig' is unknown"),
        ("step_cache", math.nan, "step_cache nan is not a number"),
        ("ring_degree", -1, "ring_degree"),
    ):
        wrong = server.client.post("/cp/check", **{name: value})
        assert reason in wrong["reason"]
        assert [fix["name"] for fix in wrong["fix"]] == [name]


@pytest.mark.parametrize(
    ("body", "charset"), [(b"{", "utf-8"), (b"\xff", "utf-8"), (b"[" * 100_000, "utf-8"), (b"{}", "nonsense")]
)
def test_a_check_of_what_cannot_be_read_is_refused(server: Server, body: bytes, charset: str) -> None:
    headers = {"Content-Type": f"application/json; charset={charset}"}
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/cp/check", body, headers)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=10)
    assert (refused.value.code, json.loads(refused.value.read())["code"]) == (400, "config.unreadable")


@pytest.mark.parametrize("path", ["status", "logs", "stop", "free", "restart", "check"])
def test_a_strangers_page_is_refused(server: Server, path: str) -> None:
    body = None if path in ("status", "logs") else b"{}"
    for address in (f"/cp/{path}", f"/api/cp/{path}"):
        for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            request = urllib.request.Request(f"http://127.0.0.1:{server.port}{address}", body, headers)
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=10)
            assert refused.value.code == 403


def test_a_saved_setting_is_in_force_without_a_restart(server: Server) -> None:
    server.client.run(sampling_graph(FLUX, "CPSampler", TWO))
    try:
        _save(server, "IdleSeconds", 1)
        ended = status_when(server, lambda now: now["state"] == "none", 10)
        assert ended["idle_seconds"] == 1
        assert ended["reason"] == "ended after 1 s without a run"
    finally:
        _save(server, "IdleSeconds", 0)
    _save(server, "StallSeconds", 77)
    assert status_when(server, lambda now: now["stall_seconds"] == 77)
    for nonsense in ("nonsense", 10**400, -1):
        _save(server, "StallSeconds", 77)
        assert status_when(server, lambda now: now["stall_seconds"] == 77)
        _save(server, "StallSeconds", nonsense)
        assert status_when(server, lambda now: now["stall_seconds"] == 120)


@pytest.mark.parametrize("text", ["{ this is no json", "[" * 100_000], ids=["broken", "deep"])
def test_settings_that_cannot_be_read_are_as_usual_and_the_log_says_so(server: Server, text: str) -> None:
    _save(server, "StallSeconds", 77)
    assert status_when(server, lambda now: now["stall_seconds"] == 77)
    saved = server.base / "user" / "default" / "comfy.settings.json"
    before = saved.read_text()
    saved.write_text(text)
    try:
        assert status_when(server, lambda now: now["stall_seconds"] == 120)
        assert any("is not valid JSON" in line["text"] for line in server.client.get("/cp/logs")["lines"])
    finally:
        saved.write_text(before)
    assert status_when(server, lambda now: now["stall_seconds"] == 77)


def _environment(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return {name.decode(): value.decode() for name, _, value in (entry.partition(b"=") for entry in entries)}


def _save(server: Server, name: str, value: object) -> None:
    address = f"http://127.0.0.1:{server.port}/settings/CPSampler.{name}"
    urllib.request.urlopen(urllib.request.Request(address, json.dumps(value).encode(), method="POST"), timeout=10)
