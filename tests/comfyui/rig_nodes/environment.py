"""The environment of ComfyUI's process, as a test wants it from now on: what is read anew needs no other ComfyUI."""

from __future__ import annotations

import os

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
