"""Writes every workflow and its thumbnail, by ComfyUI's own page.

python -m tests.browser.templates [NAME ...]
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from ...comfyui.comfy import find_comfy, why_there_is_none
from ...comfyui.server import running_server
from ..comfyui_page import EXAMPLE, chromium, comfyui_page
from .card import HEIGHT, WIDTH, card
from .catalogue import templates
from .graph import Template

FOLDER = EXAMPLE.parent
BUILD = (Path(__file__).parent / "build.js").read_text()


def main(names: list[str]) -> None:
    comfy, path = find_comfy(), chromium()
    if comfy is None or path is None:
        raise SystemExit(why_there_is_none() if comfy is None else "NO BROWSER: apt-get install chromium")
    with (
        tempfile.TemporaryDirectory() as profile,
        running_server(comfy) as server,
        sync_playwright() as playwright,
        comfyui_page(playwright.chromium, path, server, Path(profile)) as page,
    ):
        for template in templates():
            if not names or template.name in names:
                write(page, template)


def write(page: Any, template: Template) -> None:
    workflow = page.evaluate(BUILD, template.spec())
    workflow.pop("id", None)  # another one every time
    text = json.dumps(workflow, indent=1, ensure_ascii=False)
    (FOLDER / f"{template.file}.json").write_text(text + "\n", encoding="utf-8")
    thumbnail(page, template)


def thumbnail(page: Any, template: Template) -> None:
    tab = page.context.new_page()
    tab.set_viewport_size({"width": WIDTH, "height": HEIGHT})
    tab.set_content(f"<style>body{{margin:0}}</style>{card(template)}")
    picture = Image.open(io.BytesIO(tab.screenshot())).convert("RGB")
    picture.save(FOLDER / f"{template.file}.jpg", quality=86, optimize=True)
    tab.close()


if __name__ == "__main__":
    main(sys.argv[1:])
