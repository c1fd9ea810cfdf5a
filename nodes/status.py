"""What the group is doing, in JSON: for /cp/status, and as the event cp.status whenever it changes."""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from server import PromptServer

from ..parallel_runtime.host.pipelines import blocks_of_rank
from ..parallel_runtime.host.runtime import runtime
from ..parallel_runtime.host.status import RankStatus, Status
from ..parallel_runtime.specs import Parallelism
from .settings import PACKAGES, refresh
from .workers import visible_gpus

EVENT = "cp.status"
LOOK_SECONDS = 0.25
AS_IT_IS = ("state", "reason", "since", "stage", "model", "loaded", "step", "steps")  # of a Status
VERSION = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["version"]


def described(now: Status) -> dict[str, Any]:
    """What everybody may know who may see ComfyUI's page: names of files, never their folders, no process, no token."""
    return {
        **{name: getattr(now, name) for name in AS_IT_IS},
        "text": in_words(now),
        "elapsed": time.time() - now.since,
        "loss": asdict(now.loss) if now.loss else None,
        "help": page_for(now),
        "world_size": now.placement.world_size if now.placement else 0,
        "nnodes": now.placement.nnodes if now.placement else 0,
        "degrees": now.degrees.by_name if now.degrees else None,
        "ranks": [_rank(rank, now.degrees) for rank in now.ranks],
        "runs": [asdict(run) for run in now.runs],
    }


def page_for(now: Status) -> str:
    """Of the pages on what to do, the name of the one for this failure; "" where there was none."""
    if now.state == "unstarted":
        return "machines-do-not-meet" if now.placement and now.placement.nnodes > 1 else "workers-do-not-start"
    if now.state != "died" or now.loss is None:
        return ""
    if "out of memory" in now.reason:
        return "out-of-gpu-memory"
    return "worker-is-silent" if "has not been heard of" in now.reason else "worker-was-killed"


def everything() -> dict[str, Any]:
    """The same with what does not change while a group lives."""
    return {
        **described(runtime.status()),
        "gpus": visible_gpus(),
        "cores": os.cpu_count(),
        "idle_seconds": float(runtime.idle),
        "stall_seconds": float(runtime.stall),
        "versions": {"context-parallel-sampler": VERSION, "torch": torch.__version__, "os": platform.system()},
    }


def in_words(now: Status) -> str:
    """A few words, English; the page says the same in the user's language."""
    match now.state:
        case "none":
            return "no workers"
        case "unstarted":
            return "the workers did not start"
        case "loading":
            return f"loading {now.loaded:.0%}"
        case "sampling" if now.steps:
            return f"step {now.step} of {now.steps}"
        case state:
            return state


def start_publishing() -> None:
    """From now on what changes is sent to every page, and saved settings come into force."""
    for package in PACKAGES:
        logging.getLogger(package).addHandler(runtime.journal)
    threading.Thread(target=_publish, name="cp status", daemon=True).start()


def _publish() -> None:
    """Looks instead of being told: nothing that a page does can slow a run down."""
    sent: Status | None = None
    while True:
        refresh()
        now = runtime.status()
        if now != sent:
            PromptServer.instance.send_sync(EVENT, described(now))
            sent = now
        time.sleep(LOOK_SECONDS)


def _rank(rank: RankStatus, degrees: Parallelism | None) -> dict[str, Any]:
    readings = rank.readings
    return {
        "rank": rank.rank,
        "device": rank.device,
        "machine": rank.machine,
        "loaded": rank.loaded,
        "blocks": blocks_of_rank(degrees, rank.rank) if degrees else None,
        "used_bytes": readings.used_bytes if readings else None,
        "total_bytes": readings.total_bytes if readings else None,
        "step_seconds": readings.step_seconds or None if readings else None,
        "waited_seconds": readings.waited_seconds if readings else None,
        "weights": [asdict(holding) for holding in readings.weights] if readings else [],
        "graphs": asdict(readings.graphs) if readings else None,
    }
