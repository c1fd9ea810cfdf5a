"""Makes the README's picture anew: the example workflow after a run, as ComfyUI shows it.

python -m tests.browser.picture
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from ..comfyui.comfy import find_comfy, why_there_is_none
from ..comfyui.server import running_server
from .comfyui_page import EXAMPLE, chromium, comfyui_page, run_example

SHOWN = (60, 89, 1400, 900)  # the nodes, without ComfyUI's bars and buttons
SETTLE_MILLISECONDS = 3000


def main() -> None:
    comfy, path = find_comfy(), chromium()
    if comfy is None or path is None:
        raise SystemExit(why_there_is_none() if comfy is None else "NO BROWSER: apt-get install chromium")
    with (
        tempfile.TemporaryDirectory() as profile,
        running_server(comfy) as server,
        sync_playwright() as playwright,
        comfyui_page(playwright.chromium, path, server, Path(profile)) as page,
    ):
        run_example(page)
        page.wait_for_timeout(SETTLE_MILLISECONDS)
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB").crop(SHOWN)
    picture.save(EXAMPLE.with_suffix(".jpg"), quality=88, optimize=True)


if __name__ == "__main__":
    main()
