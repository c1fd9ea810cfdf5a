"""Every node of ours has a help page, which names all of its inputs and which ComfyUI shows."""

from __future__ import annotations

from typing import Any

import pytest

from ..comfyui.comfy import OUR_ROOT
from ..comfyui.server import Server
from .graphs import wait_until_drawn
from .renderers import BOTH

DOCS = OUR_ROOT / "web" / "docs"
PACK = "custom_nodes.context-parallel-sampler"

PUT = """kind => {
    app.canvas.deselectAll();
    app.graph.clear();
    const node = LiteGraph.createNode(kind ?? 'CPParallelConfig');
    node.pos = [400, 300];
    app.graph.add(node);
}"""
SELECTED = """() => {
    const [node] = app.graph.nodes, { canvas } = app;
    if (canvas.selectedItems.has(node) && document.querySelector('[data-testid="info-button"]')) return true;
    canvas.deselectAll();
    canvas.processSelect(node);
}"""
POLL_MILLISECONDS = 250

HEADING = "title => document.querySelector('.node-help-content h1')?.textContent === title"
TOO_WIDE = """async () => {
    let wide = [];
    for (let frame = 0; frame < 100; frame++) {
        const pane = document.querySelector('.node-help-content');
        const edge = pane.getBoundingClientRect().right + 1;
        wide = [...pane.querySelectorAll('*')].filter(one => one.getBoundingClientRect().right > edge);
        if (!wide.length) break;
        await new Promise(requestAnimationFrame);
    }
    return wide.map(one => one.textContent.slice(0, 40));
}"""


BROKEN_NAMES = """() => [...document.querySelectorAll('.node-help-content td:first-child')].filter(cell => {
    const text = document.createRange();
    text.selectNodeContents(cell);
    return /^\\w+$/.test(cell.textContent) && new Set([...text.getClientRects()].map(line => line.top)).size > 1;
}).map(cell => cell.textContent)"""


def test_every_node_has_a_page_that_names_its_inputs(server: Server) -> None:
    ours = {name: info for name, info in server.client.get("/object_info").items() if info["python_module"] == PACK}
    assert set(ours) == {page.stem for page in DOCS.glob("*.md")}
    for name, info in ours.items():
        text = (DOCS / f"{name}.md").read_text()
        assert text.startswith(f"# {info['display_name']}\n")
        shown = [given for kind in ("required", "optional") for given in info["input_order"].get(kind, ())]
        assert [given for given in shown if f"| {given} |" not in text] == [], name


def test_every_node_and_socket_says_what_it_is_for(server: Server) -> None:
    for name, info in server.client.get("/object_info").items():
        if info["python_module"] == PACK:
            given = {
                input: spec for kind in ("required", "optional") for input, spec in info["input"].get(kind, {}).items()
            }
            silent = [input for input, spec in given.items() if len(spec) < 2 or not spec[1].get("tooltip")]
            assert silent == [], name
            assert info["description"], name
            assert all(info["output_tooltips"]), name


def test_every_language_has_words_for_every_node_and_socket(server: Server) -> None:
    """More may be there: what a later version adds, or a translation that came first."""
    infos = {name: info for name, info in server.client.get("/object_info").items() if info["python_module"] == PACK}
    for language, words in server.client.get("/i18n").items():
        if language == "en" or "cpSampler" not in words:
            continue
        for name, info in infos.items():
            definition = words["nodeDefs"][name]
            given = [input for kind in ("required", "optional") for input in info["input"].get(kind, {})]
            assert [input for input in given if input not in definition["inputs"]] == [], (language, name)
            assert len(definition["outputs"]) == len(info["output"]), (language, name)
            assert definition["display_name"]


@pytest.mark.parametrize("page", [{"Comfy.Locale": "zh"}], indirect=True)
def test_nodes_speak_the_users_language(page: Any) -> None:
    page.evaluate(PUT)
    assert page.evaluate("() => app.graph.nodes[0].title") == "CP 并行配置"


def open_help(page: Any, kind: str) -> None:
    """Puts a node alone, and presses its button for help. The node is selected until ComfyUI shows the button: a busy
    page may miss it once."""
    page.evaluate(PUT, kind)
    wait_until_drawn(page)
    page.wait_for_function(SELECTED, polling=POLL_MILLISECONDS)
    page.get_by_test_id("info-button").click()


@pytest.mark.parametrize("width", [1640, 1100])
@BOTH
def test_comfyui_shows_every_page_in_its_pane_and_nothing_is_wider(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 1000})
    for one in sorted(DOCS.glob("*.md")):
        open_help(page, one.stem)
        page.wait_for_function(HEADING, arg=one.read_text().splitlines()[0].removeprefix("# "))
        assert page.evaluate(TOO_WIDE) == [], one.name
        assert page.evaluate(BROKEN_NAMES) == [], one.name


def test_a_link_of_a_page_opens_the_full_text_in_a_dialog(page: Any) -> None:
    open_help(page, "CPParallelConfig")
    page.get_by_role("link", name="The full page").click()
    page.locator("dialog.cp-help").get_by_role("heading", name="CP Parallel Config in full").wait_for()
    page.get_by_role("button", name="Close").last.click()
    page.wait_for_function("!document.querySelector('dialog.cp-help')")


def test_the_page_of_the_config_is_short() -> None:
    assert len((DOCS / "CPParallelConfig.md").read_text().split()) <= 900
