"""A headless Chromium in front of one ComfyUI server; where one of them is missing these tests skip, loudly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ..comfyui.comfy import find_comfy, why_there_is_none
from ..comfyui.server import Server, running_server
from .comfyui_page import chromium, comfyui_page, front_end

WHY_NONE = "NO BROWSER: pip install playwright, and apt-get install chromium (or set CHROMIUM to its path)"


@pytest.fixture(scope="session")
def browser() -> Iterator[tuple[Any, str]]:
    """Playwright's chromium, and the path of the one to start."""
    sync_api = pytest.importorskip("playwright.sync_api", reason=WHY_NONE)
    if (path := chromium()) is None:
        pytest.skip(WHY_NONE)
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium, path


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    if (comfy := find_comfy()) is None:
        pytest.skip(why_there_is_none())
    with running_server(comfy, flags=front_end()) as server:
        yield server


@pytest.fixture
def page(browser: tuple[Any, str], server: Server, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """`parametrize` it indirectly with ComfyUI's settings to have others."""
    with comfyui_page(*browser, server, tmp_path, settings=getattr(request, "param", None)) as page:
        yield page
    server.client.settle()
