"""ComfyUI's page in a headless Chromium, and what a user does there. Knows nothing of pytest."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..comfyui.comfy import OUR_ROOT
from ..comfyui.server import Server

EXAMPLE = OUR_ROOT / "example_workflows" / "01 Demo, the same picture twice.json"
TAB = '.side-bar-button:has([class~="icon-[lucide--cpu]"])'  # of our panel, in every language
TOAST = '.p-toast-message-text, [data-testid="toast"]'  # of older pages, and from 1.58 or so on
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SETTINGS = {  # a newcomer gets a dialog first; the others are as a fresh profile has them
    "Comfy.TutorialCompleted": True,
    "Comfy.Minimap.Visible": False,
    "Comfy.Locale": "en",
    "Comfy.ColorPalette": "dark",
    "Comfy.VueNodes.Enabled": False,
    "Comfy.RightSidePanel.IsOpen": False,  # the server keeps what the test before has left
}
VIEW = {"width": 1640, "height": 1000}
RUN_MILLISECONDS = 180_000
PATIENCE_MILLISECONDS = 120_000  # a busy machine draws slowly

OPEN = "async workflow => { await app.loadGraphData(workflow) }"
LISTEN = """() => {
    window.heard = { progress: [], end: null };
    app.api.addEventListener('progress', event => window.heard.progress.push(event.detail));
    app.api.addEventListener('execution_success', () => { window.heard.end = 'success' });
    app.api.addEventListener('execution_error', event => { window.heard.end = event.detail.exception_message });
}"""
PREVIEWS = "() => app.graph.nodes.filter(node => node.type === 'PreviewImage').map(node => node.imgs?.[0]?.src)"


def front_end() -> tuple[str, ...]:
    """ComfyUI's flags for the page in the folder CP_TEST_FRONT_END, the `static` of an unpacked frontend package."""
    root = os.environ.get("CP_TEST_FRONT_END")
    return ("--front-end-root", str(Path(root).expanduser().absolute())) if root else ()


def chromium() -> str | None:
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def comfyui_page(
    browser: Any, path: str, server: Server, profile: Path, *, settings: Mapping[str, object] | None = None
) -> Iterator[Any]:
    """The page, loaded; it reaches its server and nothing else. `browser` is playwright's chromium."""
    home = f"http://127.0.0.1:{server.port}/"
    context = browser.launch_persistent_context(profile, executable_path=path, args=FLAGS, viewport=VIEW)
    context.route(lambda url: not url.startswith((home, "data:", "blob:")), lambda route: route.abort())
    context.request.post(f"{home}settings", data={**SETTINGS, **(settings or {})})
    context.set_default_timeout(PATIENCE_MILLISECONDS)
    page = context.pages[0]
    page.goto(home)
    page.wait_for_function("window.app?.extensionManager && window.app.graph")
    page.wait_for_selector(TAB)
    yield page
    context.close()


def run_example(page: Any) -> list[dict[str, Any]]:
    """Open the example, press Run, wait for both previews. Returns ComfyUI's progress events."""
    page.evaluate(OPEN, json.loads(EXAMPLE.read_text()))
    page.evaluate(LISTEN)
    page.get_by_test_id("queue-button").click()
    page.wait_for_function("window.heard.end", timeout=RUN_MILLISECONDS)
    end = page.evaluate("window.heard.end")
    assert end == "success", end
    page.wait_for_function(f"({PREVIEWS})().every(source => source)")
    return page.evaluate("window.heard.progress")


def previews(page: Any) -> list[bytes]:
    """The pictures that the example's previews show, from top to bottom."""
    return [page.request.get(source).body() for source in page.evaluate(PREVIEWS)]
