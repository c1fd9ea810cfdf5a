"""The HTTP routes under /cp, which ComfyUI serves under /api/cp too, behind its own check of where a call is from."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import comfy.model_management
from aiohttp import web
from server import PromptServer

from ..parallel_runtime.errors import Refused
from ..parallel_runtime.host.journal import LINES
from ..parallel_runtime.host.remedy import changes, instead
from ..parallel_runtime.host.runtime import runtime
from ..parallel_runtime.host.shares import percent_of
from ..parallel_runtime.host.status import BUSY
from ..parallel_runtime.specs import ParallelRequest
from .status import everything
from .workers import comfy_setup, plan_any, visible_gpus, wish_here

log = logging.getLogger(__name__)

PAGES = Path(__file__).parents[1] / "docs" / "troubleshooting"
BY_THE_USER = "the workers were restarted by the user"


def add_routes() -> None:
    routes = PromptServer.instance.routes
    routes.get("/cp/status")(get_status)
    routes.get("/cp/logs")(get_logs)
    routes.get("/cp/help/{page}")(get_help)
    routes.post("/cp/stop")(stop)
    routes.post("/cp/free")(free)
    routes.post("/cp/restart")(restart)
    routes.post("/cp/check")(check)


async def get_status(_: web.Request) -> web.Response:
    """What the group is doing, each rank, and the limits in force."""
    return web.json_response(await _aside(everything))


async def get_logs(request: web.Request) -> web.Response:
    """?rank=1&lines=100: the last lines of one rank, or of all and of this pack."""
    try:
        rank = int(request.query["rank"]) if request.query.get("rank") else None
        lines = int(request.query.get("lines") or LINES)
    except ValueError:
        return _no("rank and lines are whole numbers", 400)
    return web.json_response({"lines": [asdict(line) for line in runtime.journal.tail(lines, rank)]})


async def get_help(request: web.Request) -> web.Response:
    """What to do about a failure, as text: a page of docs/troubleshooting."""
    pages = {path.stem: path for path in PAGES.glob("*.md")}
    page = pages.get(request.match_info["page"])
    if page is None:
        return _no(f"there is no such page; there are {', '.join(sorted(pages))}", 404)
    return web.Response(text=page.read_text(encoding="utf-8"), charset="utf-8")


async def stop(_: web.Request) -> web.Response:
    """Cancel the run that uses the workers, as ComfyUI's own /interrupt does; they stay warm."""
    running, _waiting = PromptServer.instance.prompt_queue.get_current_queue_volatile()
    if runtime.status().state not in BUSY or not running:
        return _no("no run uses the workers")
    comfy.model_management.interrupt_current_processing()
    return web.json_response({"stopped": True})


async def free(_: web.Request) -> web.Response:
    """Have the workers drop their models; they stay, and load again when a run needs it."""
    freed = await _aside(_free)
    return web.json_response({"freed": freed}) if freed is not None else _no("there are no workers at rest")


async def restart(_: web.Request) -> web.Response:
    """End the workers, also under a run, which fails, and start others: /cp/status says how that goes."""
    if not await _aside(lambda: runtime.restart(BY_THE_USER, comfy_setup())):
        return _no("there are no workers to restart")
    log.info("[CP] the user has restarted the workers")
    return web.json_response({"restarted": True})


async def check(request: web.Request) -> web.Response:
    """What a CP Parallel Config with these values would use, or why it cannot work."""
    try:
        asked = ParallelRequest.of(await request.json())
    except ValueError as error:
        return _no(f"no CP Parallel Config: {error}", 400)
    gpus = visible_gpus()
    try:
        division = plan_any(asked, guided=True)
    except Refused as refused:
        nearest = instead(partial(wish_here, guided=True), asked, refused.fix)
        fix = [asdict(change) for change in changes(asked, nearest)]
        return web.json_response({"gpus": gpus, "reason": str(refused), "fix": fix})
    placement = division.placement
    told = {"workers": placement.world_size, "devices": placement.devices, "degrees": division.degrees.by_name}
    told["shares"] = percent_of(division) if len(set(division.degrees.shares)) > 1 else []
    return web.json_response({"gpus": gpus, "cores": os.cpu_count(), "reason": "", **told})


def _free() -> list[str] | None:
    with runtime.resting() as group:
        held = [] if group is None else list(group.held.values())
        freed = [model.spec.title for model in held if model.give_back()]
        return None if group is None else freed


def _no(reason: str, code: int = 409) -> web.Response:
    return web.json_response({"error": reason}, status=code)


async def _aside(work: Any) -> Any:
    """On a thread of its own: the page is served meanwhile."""
    return await asyncio.get_running_loop().run_in_executor(None, work)
