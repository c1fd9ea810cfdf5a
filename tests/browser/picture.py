"""Makes the README's pictures anew: the example workflow after a run, and the workers' panel in the middle of another.

python -m tests.browser.picture
"""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from ..comfyui.comfy import OUR_ROOT, find_comfy, why_there_is_none
from ..comfyui.server import running_server
from .comfyui_page import EXAMPLE, TAB, chromium, comfyui_page, run_example

PANEL = OUR_ROOT / "web" / "docs" / "panel.jpg"
PANEL_SHOWN = (0, 37, 1000, 760)
LONGER = """() => {
    const set = (kind, values) => {
        const node = app.graph.nodes.find(node => node.type === kind);
        for (const widget of node.widgets) {
            if (widget.name in values) { widget.value = values[widget.name]; widget.callback?.(widget.value); }
        }
    };
    set('CPSampler', { steps: 800 });
    set('CPParallelConfig', { devices: 'cpu,cpu' });
}"""  # the same workflow, long enough to be looked at, on two workers
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
        take(page, SHOWN, EXAMPLE.with_suffix(".jpg"))
        page.evaluate(LONGER)
        page.locator(TAB).click()
        page.get_by_test_id("queue-button").click()
        page.wait_for_function("document.querySelector('.cp-state').textContent.startsWith('Step')")
        page.wait_for_timeout(SETTLE_MILLISECONDS)
        take(page, PANEL_SHOWN, PANEL)
        server.client.settle()


def take(page: Any, box: tuple[int, int, int, int], path: Path) -> None:
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB").crop(box)
    picture.save(path, quality=88, optimize=True)


if __name__ == "__main__":
    main()
