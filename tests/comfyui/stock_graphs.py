"""The API graph of every stock workflow that samples, as ComfyUI's own page makes it in a headless Chromium. They are
made once for each version of the templates and of the page, and kept in the user's cache, never in this repository."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parallel_runtime.commands.migrate import REPLACEMENTS

from ..browser.comfyui_page import chromium, comfyui_page
from .client import Graph
from .comfy import ComfyInstall
from .server import running_server

log = logging.getLogger(__name__)

PAGE = "comfyui-frontend-package"
VERSION = f"import importlib.metadata; print(importlib.metadata.version({PAGE!r}))"
CONVERT = """async workflow => {
    const quiet = { showMissingNodesDialog: false, showMissingModelsDialog: false, checkForRerouteMigration: false };
    await app.loadGraphData(workflow, true, false, null, quiet);
    return (await app.graphToPrompt()).output;
}"""


class NoBrowser(Exception):
    """Playwright or Chromium is missing."""


def graphs(comfy: ComfyInstall, version: str, workflows: Mapping[str, Any]) -> dict[str, Graph]:
    """By name, of `workflows` in the form that ComfyUI saves; `version` is that of their package."""
    page = subprocess.run([comfy.python, "-c", VERSION], capture_output=True, text=True, check=True).stdout.strip()
    folder = _cache() / f"templates-{version}-page-{page}"
    folder.mkdir(parents=True, exist_ok=True)
    files = {name: folder / f"{name}.json" for name in workflows}
    if missing := [name for name, file in files.items() if not file.exists()]:
        _convert(comfy, {files[name]: workflows[name] for name in missing})
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items()}


def samplers(graph: Graph) -> list[str]:
    """The nodes of a native or migrated graph that sample."""
    kinds = {*REPLACEMENTS, *REPLACEMENTS.values()}
    return [name for name, call in graph.items() if call.get("class_type") in kinds]


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "context-parallel-sampler"


def _convert(comfy: ComfyInstall, workflows: Mapping[Path, Any]) -> None:
    """Each into a file as soon as it is made: what was interrupted goes on from there."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        raise NoBrowser("pip install playwright") from None
    if (path := chromium()) is None:
        raise NoBrowser("apt-get install chromium, or set CHROMIUM to its path")
    with (
        running_server(comfy) as server,
        sync_playwright() as playwright,
        tempfile.TemporaryDirectory() as profile,
        comfyui_page(playwright.chromium, path, server, Path(profile)) as page,
    ):
        for number, (file, workflow) in enumerate(workflows.items()):
            made = file.with_suffix(f".{os.getpid()}")
            made.write_text(json.dumps(page.evaluate(CONVERT, workflow)), encoding="utf-8")
            made.replace(file)
            log.info("page: %d of %d, %s", number + 1, len(workflows), file.stem)
