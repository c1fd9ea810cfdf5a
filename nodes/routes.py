"""The worker group's status in JSON, for /cp/status and as the event cp.status whenever it changes; and the HTTP routes
under /cp, which ComfyUI serves under /api/cp too, behind its own check of the origin."""

import asyncio
import logging
import os
import platform
import time
import tomllib
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import comfy.model_management
import folder_paths
import torch
from aiohttp import web
from server import PromptServer

from ..parallel_runtime.commands.migrate import LARGE_ENCODER_BYTES
from ..parallel_runtime.errors import Refused, say, to_json
from ..parallel_runtime.group.activity import BUSY, RankStatus, Status
from ..parallel_runtime.group.runtime import runtime
from ..parallel_runtime.group.torchrun import LINES
from ..parallel_runtime.loading.code_names import unusable
from ..parallel_runtime.planning.request_checks import changes, changes_to, instead
from ..parallel_runtime.request import ParallelRequest
from ..parallel_runtime.specs import Parallelism
from .describe import host

EVENT = "cp.status"
POLL_SECONDS = 0.25
STATUS_FIELDS = ("state", "reason", "since", "stage", "model", "loaded", "step", "steps")
WEIGHT_FIELDS = ("model", "resident", "fetched")  # of a Holding
VERSION = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["version"]
log = logging.getLogger(__name__)
DOCS = Path(__file__).parents[1] / "docs"


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


def status_text(now: Status) -> str:
    """Returns the status in a few English words; the page shows it in the user's language."""
    if now.state == "sampling" and now.steps:
        return f"step {now.step} of {now.steps}"
    words = {"none": "no workers", "unstarted": "the workers did not start", "loading": f"loading {now.loaded:.0%}"}
    return words.get(now.state, now.state)


def publish() -> None:
    """Sends every change to all pages, and applies saved settings; polls the status, so that no page can slow a run
    down."""
    sent: Status | None = None
    while True:
        host.refresh()
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
        "blocks": degrees.blocks_of(rank.rank) if degrees else None,
        **rank.shown,
        "weights": [{name: getattr(model, name) for name in WEIGHT_FIELDS} for model in weights],
        "graphs": asdict(readings.graphs) if readings else None,
    }


def add_routes() -> None:
    routes = PromptServer.instance.routes
    routes.get("/cp/status")(get_status)
    routes.get("/cp/logs")(get_logs)
    routes.get("/cp/help/{page}")(get_help)
    routes.get("/cp/encoder")(get_encoder)
    routes.post("/cp/stop")(stop)
    routes.post("/cp/free")(free)
    routes.post("/cp/restart")(restart)
    routes.post("/cp/check")(check)


async def get_status(_: web.Request) -> web.Response:
    """Returns the status of the group and of each rank, and the limits that apply."""
    return web.json_response(await asyncio.to_thread(_full_status_json))


def _full_status_json() -> dict[str, Any]:
    """Returns the status as JSON, with GPUs, limits and versions, which events leave out."""
    kind, gpus = comfy.model_management.get_torch_device().type, []
    module = getattr(torch, kind, None)
    for index in range(host.visible_gpus()):
        one = module.get_device_properties(index) if module is not None else None
        # Memory is None for a kind that does not tell it.
        facts = {"name": str(getattr(one, "name", kind)), "total_bytes": getattr(one, "total_memory", None)}
        gpus.append({"index": index, **facts})
    return {
        **status_json(runtime.status()),
        "untested": to_json(host.untested()),
        "gpus": len(gpus),
        "gpu_list": gpus,
        "cores": os.cpu_count(),
        "idle_seconds": runtime.idle_seconds,
        "stall_seconds": runtime.stall_seconds,
        "versions": {"context-parallel-sampler": VERSION, "torch": torch.__version__, "os": platform.system()},
    }


async def get_logs(request: web.Request) -> web.Response:
    """Returns the last lines of one rank (?rank=1&lines=100), or of all ranks and this pack."""
    try:
        rank = int(request.query["rank"]) if request.query.get("rank") else None
        lines = int(request.query.get("lines") or LINES)
    except ValueError:
        return _error("rank and lines are whole numbers", 400)
    return web.json_response({"lines": [asdict(line) for line in runtime.journal.tail(lines, rank)]})


async def get_help(request: web.Request) -> web.Response:
    """Returns a page of docs/ or docs/troubleshooting as text; web/help.js shows it."""
    pages = {path.stem: path for folder in (DOCS, DOCS / "troubleshooting") for path in folder.glob("*.md")}
    page = pages.get(request.match_info["page"])
    if page is None:
        return _error(f"this page does not exist; there are {', '.join(sorted(pages))}", 404)
    return web.Response(text=page.read_text(encoding="utf-8"), charset="utf-8")


async def get_encoder(request: web.Request) -> web.Response:
    """Returns whether CP CLIP pays for a CLIP of these files (?clip=NAME&clip=NAME), beside a network of these
    (&model=NAME): a large one, or one without room on ComfyUI's GPU, where there is another GPU."""
    sizes = {"clip": 0, "model": 0}
    for parameter, folder in {"clip": "text_encoders", "model": "diffusion_models"}.items():
        for name in request.query.getall(parameter, []):
            path = folder_paths.get_full_path(folder, name)
            sizes[parameter] += os.path.getsize(path) if path else 0
    encoder, network = sizes["clip"], sizes["model"]
    room = comfy.model_management.get_total_memory(comfy.model_management.get_torch_device())
    pays = encoder > LARGE_ENCODER_BYTES or (encoder > 0 and encoder + network > room)
    return web.json_response({"pays": pays and host.visible_gpus() != 1, "bytes": encoder})


async def stop(_: web.Request) -> web.Response:
    """Cancels the run in the workers, like ComfyUI's /interrupt; they stay warm."""
    running, _waiting = PromptServer.instance.prompt_queue.get_current_queue_volatile()
    state = runtime.status().state
    if state not in BUSY or (state == "starting" and not runtime.awaited) or not running:
        return _error("no run uses the workers")
    comfy.model_management.interrupt_current_processing()
    return web.json_response({"stopped": True})


async def free(_: web.Request) -> web.Response:
    """Has the workers unload their models; the next run loads again."""
    before = _weight_bytes()
    freed = await asyncio.to_thread(_unload_models)
    if freed is None:
        return _error("no workers are idle")
    return web.json_response({"freed": freed, "bytes": before - _weight_bytes()})


async def restart(_: web.Request) -> web.Response:
    """Ends the workers, also during a run, which fails, and starts others in the background, which try packs again that
    have failed in these."""
    unusable.clear()
    if not await asyncio.to_thread(runtime.restart, say("ended.restarted"), host.comfy_setup()):
        return _error("there are no workers to restart")
    log.info("[CP] the workers have stopped: %s", say("ended.restarted"))
    return web.json_response({"restarted": True})


async def check(request: web.Request) -> web.Response:
    """Returns the plan of a CP Parallel Config with these values, or why it cannot work."""
    try:
        values = await request.json()
    except (ValueError, LookupError, RecursionError) as error:  # LookupError: of the request's charset
        refused = Refused("config.unreadable", reason=str(error))
        return web.json_response({"error": str(refused), **host.refusal_json(refused), "fix": []}, status=400)
    return web.json_response(await asyncio.to_thread(_plan_json, values))


def _plan_json(values: object) -> dict[str, Any]:
    gpus = host.visible_gpus()
    config = None
    try:
        config = ParallelRequest.of(values)
        plan = host.plan_without_model(config, guided=True)
    except Refused as refused:
        wrong, changed = refused, changes_to(refused.fix)
        if config is not None:
            nearest, wrong = instead(partial(host.plan_without_model, guided=True), config, refused)
            changed = changes(config, nearest)
        fix = [asdict(change) for change in changed]
        return {"gpus": gpus, "reason": str(wrong), **host.refusal_json(wrong), "fix": fix}
    placement = plan.placement
    degrees = config.degrees_without_model(placement.world_size)
    result = {"workers": placement.world_size, "devices": placement.devices, "degrees": degrees}
    result["shares"] = plan.work_percent if len(set(plan.degrees.shares)) > 1 else []
    return {"gpus": gpus, "cores": os.cpu_count(), "reason": "", **result}


def _unload_models() -> list[str] | None:
    with runtime.idle_group() as group:
        return None if group is None else [model.spec.title for model in list(group.models.values()) if model.free()]


def _weight_bytes() -> int:
    """Returns the size of the weights on all workers' devices."""
    readings = [rank.readings for rank in runtime.status().ranks if rank.readings is not None]
    return sum(model.resident for reading in readings for model in reading.weights)


def _error(reason: str, code: int = 409) -> web.Response:
    return web.json_response({"error": reason}, status=code)
