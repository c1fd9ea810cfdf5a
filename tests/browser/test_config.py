"""CP Parallel Config says while it is edited what its values make, and why they cannot work; few show at first."""

from __future__ import annotations

from typing import Any

import pytest

from .graphs import put, wait_until_drawn
from .renderers import BOTH

SUMMARY = ".cp-summary"
EDIT = """([name, value]) => {
    const node = app.graph.nodes.find(node => node.type === 'CPParallelConfig');
    const widget = node.widgets.find(widget => widget.name === name);
    widget.value = value;
    widget.callback?.(value, app.canvas, node);
}"""
SAVED = "() => app.graph.serialize().nodes.find(node => node.type === 'CPParallelConfig').widgets_values"
ERROR = "() => Boolean(app.graph.nodes.find(node => node.type === 'CPParallelConfig').has_errors)"
FRAMED = """() => !LiteGraph.vueNodesMode
    || [...document.querySelector('[data-testid="node-inner-wrapper"]').classList]
        .some(name => name.startsWith('ring-destructive'))"""
UNFRAMED = "() => LiteGraph.vueNodesMode && Boolean(app.extensionManager.toast.error)"  # from 1.58 or so on
HEIGHT = "() => app.graph.nodes[0].size[1]"
SHOWN = """() => LiteGraph.vueNodesMode
    ? [...document.querySelectorAll('[data-testid="node-widget"]')]
        .filter(row => row.offsetHeight && !row.querySelector('.cp-summary')).length
    : app.graph.nodes[0].widgets.filter(widget => !widget.hidden && widget.name !== 'cp_summary').length"""
SAYS = "words => document.querySelector('.cp-summary')?.textContent.includes(words)"


@BOTH
def test_it_says_what_its_values_make_and_turns_red_with_the_reason(page: Any) -> None:
    put(page, [["CPParallelConfig", 0, 0, {}]])
    saved = page.evaluate(SAVED)
    summary = page.locator(SUMMARY)
    page.wait_for_function(SAYS, arg="1 CPU worker, nothing is divided")
    for name, value in (("ring_degree", 2), ("ulysses_degree", 2), ("cfg_degree", 1), ("devices", "cpu,cpu,cpu,cpu")):
        page.evaluate(EDIT, [name, value])
    page.wait_for_function(SAYS, arg="4 CPU workers, each 1/4 of the picture's tokens")
    assert page.locator(".cp-terms").inner_text() == "ring 2 x ulysses 2 x cfg 1 x data 1 = 4 workers"
    assert "4 workers share this machine's" in summary.inner_text(), "four on its cores are no promise of speed"
    assert "cp-bad" not in summary.get_attribute("class")

    page.evaluate(EDIT, ["devices", ""])
    page.evaluate(EDIT, ["ring_degree", 3])
    page.wait_for_function(SAYS, arg="6 workers share this machine's")
    page.evaluate(EDIT, ["devices", "cpu,cpu,cpu,cpu"])
    page.wait_for_function("document.querySelector('.cp-summary.cp-bad')")
    assert "ring_degree 3 x ulysses_degree 2 needs 6 workers" in summary.inner_text()
    assert page.evaluate(ERROR)
    if not page.evaluate(UNFRAMED):
        page.wait_for_function(FRAMED)
    shown, inner = summary.bounding_box(), page.locator(".cp-words").bounding_box()
    assert inner["y"] + inner["height"] <= shown["y"] + shown["height"] + 1, "the reason is cut off"

    page.evaluate(EDIT, ["ring_degree", 2])
    page.wait_for_function("!document.querySelector('.cp-summary.cp-bad')")
    assert not page.evaluate(ERROR)
    page.wait_for_function(f"({UNFRAMED})() || (LiteGraph.vueNodesMode ? !({FRAMED})() : true)")
    assert len(page.evaluate(SAVED)) == len(saved), "the text is no widget that is saved"

    heights = []
    for ring, says in ((1, "devices names 4"), (2, "4 CPU workers"), (1, "devices names 4"), (2, "4 CPU workers")):
        page.evaluate(EDIT, ["ring_degree", ring])
        page.wait_for_function(SAYS, arg=says)
        wait_until_drawn(page)
        heights.append(page.evaluate(HEIGHT))
    assert heights[1] == heights[3], "it grows and grows"


@BOTH
def test_a_wrong_one_has_the_nearest_that_works_as_a_button(page: Any) -> None:
    put(page, [["CPParallelConfig", 0, 0, {"ring_degree": 3, "ulysses_degree": 2, "devices": "cpu,cpu,cpu,cpu"}]])
    page.wait_for_selector(".cp-summary.cp-bad")
    use = page.locator(".cp-out").get_by_role("button", name="Use ring_degree 2")
    wait_until_drawn(page)
    shown, button = page.locator(SUMMARY).bounding_box(), use.bounding_box()
    assert button["y"] + button["height"] <= shown["y"] + shown["height"] + 1, "it is cut off"
    use.click()
    page.wait_for_function(SAYS, arg="4 CPU workers")
    assert page.locator(".cp-out button").count() == 0
    assert not page.evaluate(ERROR)


@pytest.mark.parametrize("page", [{"Comfy.Locale": "zh"}], indirect=True)
def test_why_it_cannot_work_is_said_in_the_users_language(page: Any) -> None:
    put(page, [["CPParallelConfig", 0, 0, {"ring_degree": 3, "ulysses_degree": 1, "devices": "cpu,cpu"}]])
    page.wait_for_selector(".cp-summary.cp-bad")
    text = page.locator(".cp-what").inner_text()
    assert text == (
        "ring_degree 3 x ulysses_degree 1 需要 3 个工作进程，但只有 2 个设备：cpu, cpu。最接近的可行设置是 "  # noqa: RUF001
        "ring_degree 2 x ulysses_degree 1"
    )


@BOTH
def test_three_widgets_show_until_one_of_the_others_says_something_unusual(page: Any) -> None:
    put(page, [["CPParallelConfig", 0, 0, {}]])
    page.wait_for_function(SAYS, arg="1 CPU worker")
    page.wait_for_function(f"({SHOWN})() === 3")
    wait_until_drawn(page)
    folded = page.evaluate(HEIGHT)
    assert folded < 300
    page.get_by_role("button", name="Show advanced inputs").or_(page.get_by_role("button", name="more options")).click()
    page.wait_for_function(f"({SHOWN})() > 14")
    page.get_by_role("button", name="Hide advanced inputs").or_(
        page.get_by_role("button", name="Fewer options")
    ).click()
    page.wait_for_function(f"({SHOWN})() === 3")
    page.evaluate("async () => app.loadGraphData(app.graph.serialize())")
    page.wait_for_function(SAYS, arg="1 CPU worker")
    wait_until_drawn(page)
    assert page.evaluate(HEIGHT) < 300, "as high as all widgets, once it is loaded"
    page.evaluate(EDIT, ["dtype", "banana"])
    page.evaluate("async () => app.loadGraphData(app.graph.serialize())")
    page.wait_for_function("document.querySelector('.cp-summary.cp-bad')?.textContent.includes('banana')")
    page.wait_for_function(f"({SHOWN})() > 14")


def test_the_properties_panel_leaves_what_it_says_on_the_node(page: Any) -> None:
    put(page, [["CPParallelConfig", 0, 0, {}]])
    page.wait_for_function(SAYS, arg="1 CPU worker")
    wide = page.locator(SUMMARY).bounding_box()["width"]
    page.get_by_role("button", name="Toggle properties panel").click()
    page.evaluate("() => { app.canvas.deselectAll(); app.canvas.select(app.graph.nodes[0]); }")
    page.get_by_test_id("panel-tab-parameters").click()
    wait_until_drawn(page)
    assert page.get_by_text("cp_summary").count() == 0, "a blank row"
    assert abs(page.locator(SUMMARY).bounding_box()["width"] - wide) < 2, "it has shrunk to the panel"
