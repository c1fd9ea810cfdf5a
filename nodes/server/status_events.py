"""The worker group's status in JSON: for /cp/status, and as the event cp.status whenever it changes."""

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

import comfyui_version
import torch
from server import PromptServer

from ...parallel_runtime import TESTED, numbers
from ...parallel_runtime.errors import say_if, to_json
from ...parallel_runtime.group.group_status import RankStatus, Status
from ...parallel_runtime.group.runtime import runtime
from ...parallel_runtime.planning.stage_blocks import blocks_of_rank
from ...parallel_runtime.specs import Parallelism
from ..describe.host import gpus_json, visible_gpus
from .settings import PACKAGES, refresh

EVENT = "cp.status"
POLL_SECONDS = 0.25
STATUS_FIELDS = ("state", "reason", "since", "stage", "model", "loaded", "step", "steps")
WEIGHT_FIELDS = ("model", "resident", "fetched")  # of a Holding
VERSION = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["version"]


def status_json(now: Status) -> dict[str, Any]:
    """Returns a status as JSON for everybody who can open ComfyUI's page: no folders, processes or tokens."""
    return {
        **{name: getattr(now, name) for name in STATUS_FIELDS},
        "sentence": to_json(now.reason),
        "text": status_text(now),
        "elapsed": time.monotonic() - now.began_at,
        "loss": asdict(now.loss) if now.loss else None,
        "help": help_page(now),
        "world_size": now.placement.world_size if now.placement else 0,
        "nnodes": now.placement.nnodes if now.placement else 0,
        "degrees": now.degrees.by_name if now.degrees else None,
        "ranks": [_rank_json(rank, now.degrees) for rank in now.ranks],
        "runs": [{**asdict(run), "reason": to_json(run.reason)} for run in now.runs],
    }


def help_page(now: Status) -> str:
    """Returns the name of the page in docs/troubleshooting for this failure; "" without one."""
    if now.state == "unstarted":
        return "machines-do-not-meet" if now.placement and now.placement.nnodes > 1 else "workers-do-not-start"
    if now.state != "died" or now.loss is None:
        return ""
    pages = {"out_of_memory": "out-of-gpu-memory", "silent": "worker-is-silent", "raised": "worker-failed"}
    return pages.get(now.loss.kind, "worker-was-killed")


def untested() -> str:
    """Returns a sentence where this ComfyUI has a newer minor version than our tests have run, else ""."""
    found, tested = numbers(comfyui_version.__version__)[:2], numbers(TESTED)[:2]
    return say_if(found > tested, "untested", tested="{}.{}".format(*tested), found="{}.{}".format(*found))


def full_status_json() -> dict[str, Any]:
    """Returns the status as JSON, with GPUs, limits and versions, which events leave out."""
    return {
        **status_json(runtime.status()),
        "untested": to_json(untested()),
        "gpus": visible_gpus(),
        "gpu_list": gpus_json(),
        "cores": os.cpu_count(),
        "idle_seconds": runtime.idle_seconds,
        "stall_seconds": runtime.stall_seconds,
        "versions": {"context-parallel-sampler": VERSION, "torch": torch.__version__, "os": platform.system()},
    }


def status_text(now: Status) -> str:
    """Returns the status in a few English words; the page shows it in the user's language."""
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
    """Starts to send every change to all pages, to apply saved settings, and to fill the journal."""
    for package in PACKAGES:
        logging.getLogger(package).addHandler(runtime.journal)
    threading.Thread(target=_publish, name="cp status", daemon=True).start()


def _publish() -> None:
    """Polls the status, so that no page can slow a run down."""
    sent: Status | None = None
    while True:
        refresh()
        now = runtime.status()
        if now != sent:
            PromptServer.instance.send_sync(EVENT, status_json(now))
            sent = now
        time.sleep(POLL_SECONDS)


def _rank_json(rank: RankStatus, degrees: Parallelism | None) -> dict[str, Any]:
    readings = rank.readings
    weights = readings.weights if readings else ()
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
        "weights": [{name: getattr(model, name) for name in WEIGHT_FIELDS} for model in weights],
        "graphs": asdict(readings.graphs) if readings else None,
    }
