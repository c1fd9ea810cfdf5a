"""The environment of ComfyUI's process, as a test wants it from now on: what is read anew needs no other ComfyUI. And
memory that ComfyUI asks the workers for, as a text encoder on a full GPU has it do."""

from __future__ import annotations

import os

import comfy.model_management
from aiohttp import web
from server import PromptServer


@PromptServer.instance.routes.post("/cp_test/environment")
async def choose(request: web.Request) -> web.Response:
    """A value for each name, or null, which takes it away."""
    for name, value in (await request.json()).items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    return web.Response()


@PromptServer.instance.routes.post("/cp_test/take")
async def take(request: web.Request) -> web.Response:
    """Whether the workers' model, of which so many `bytes` are taken, stays listed."""
    loaded = comfy.model_management.current_loaded_models
    (model,) = (one for one in loaded if type(one.model.model).__name__ == "WorkerModel")
    return web.json_response({"stays": not model.model_unload((await request.json())["bytes"])})
