"""CP Parallel Config says while it is edited what its values make, and why they cannot work."""

from __future__ import annotations

from typing import Any

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


@BOTH
def test_it_counts_workers_and_turns_red_with_the_reason(page: Any) -> None:
    put(page, [["CPParallelConfig", 0, 0, {}]])
    saved = page.evaluate(SAVED)
    summary = page.locator(SUMMARY)
    page.wait_for_function("document.querySelector('.cp-summary')?.textContent.includes('ring auto')")
    for name, value in (("ring_degree", 2), ("ulysses_degree", 2), ("devices", "cpu,cpu,cpu,cpu")):
        page.evaluate(EDIT, [name, value])
    page.wait_for_function("document.querySelector('.cp-summary').textContent.includes('= 4 CPU workers')")
    assert summary.inner_text() == "ring 2 x ulysses 2 x cfg auto x data 1 = 4 CPU workers"
    assert "cp-bad" not in summary.get_attribute("class")

    page.evaluate(EDIT, ["ring_degree", 3])
    page.wait_for_function("document.querySelector('.cp-summary.cp-bad')")
    assert "ring_degree 3 x ulysses_degree 2 needs 6 workers" in summary.inner_text()
    assert page.evaluate(ERROR)
    shown, inner = summary.bounding_box(), page.locator(".cp-words").bounding_box()
    assert inner["y"] + inner["height"] <= shown["y"] + shown["height"] + 1, "the reason is cut off"

    page.evaluate(EDIT, ["ring_degree", 2])
    page.wait_for_function("!document.querySelector('.cp-summary.cp-bad')")
    assert not page.evaluate(ERROR)
    assert len(page.evaluate(SAVED)) == len(saved), "the text is no widget that is saved"


def test_a_workflow_opens_with_its_verdict(page: Any) -> None:
    put(page, [["CPParallelConfig", 0, 0, {"devices": "banana"}]])
    page.evaluate("async () => app.loadGraphData(app.graph.serialize())")
    page.wait_for_function("document.querySelector('.cp-summary.cp-bad')?.textContent.includes('banana')")


@BOTH
def test_an_edit_does_not_make_the_node_grow_and_grow(page: Any) -> None:
    put(page, [["CPParallelConfig", 0, 0, {"devices": "cpu,cpu,cpu,cpu"}]])
    says = "ring => document.querySelector('.cp-summary')?.textContent.startsWith(`ring ${ring} `)"
    heights = []
    for ring in (1, 2, 1, 2, 1):
        page.evaluate(EDIT, ["ring_degree", ring])
        page.wait_for_function(says, arg=ring)
        wait_until_drawn(page)
        heights.append(page.evaluate("() => app.graph.nodes[0].size[1]"))
    assert len(set(heights)) == 1


def test_nodes_2_folds_it_to_what_it_shows(page: Any) -> None:
    page.evaluate("() => app.extensionManager.setting.set('Comfy.VueNodes.Enabled', true)")
    page.wait_for_function("LiteGraph.vueNodesMode")
    put(page, [["CPParallelConfig", 0, 0, {"devices": "cpu,cpu"}]])
    page.wait_for_function("document.querySelector('.cp-summary')?.textContent.includes('CPU workers')")
    wait_until_drawn(page)
    assert page.locator(".cp-summary").bounding_box()["height"] < 80, "two lines of text"
