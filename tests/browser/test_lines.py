"""The line over a sampler's node: CP Sampler's and KSampler's are measured alike, and say how a run ended."""

from __future__ import annotations

import json
import re
from typing import Any

from ..comfyui.server import Server
from .comfyui_page import EXAMPLE, LISTEN, OPEN, RUN_MILLISECONDS
from .graphs import put_sampler
from .renderers import BOTH, NODES_2

STEPS = """() => {
    window.steps = {};
    app.api.addEventListener('progress', ({ detail }) =>
        (window.steps[detail.node] ??= []).push([detail.value, performance.now() / 1000]));
}"""
LINES = """() => Object.fromEntries(app.graph.nodes
    .filter(node => node.cpLine?.text).map(node => [node.id, node.cpLine.text]))"""
LINE = "() => app.graph.nodes.find(node => node.type === 'CPSampler').cpLine.text"
CUT = """() => [...document.querySelectorAll('div:has(> div > .cp-of-run)')]
    .filter(box => box.scrollHeight > box.clientHeight + 1 || box.scrollWidth > box.clientWidth + 1)
    .map(box => box.textContent)"""
CONFIGURE = """values => {
    const config = LiteGraph.createNode('CPParallelConfig');
    const sampler = app.graph.nodes.find(one => one.type === 'CPSampler');
    app.graph.add(config);
    for (const widget of config.widgets) if (widget.name in values) widget.value = values[widget.name];
    config.connect(0, sampler, sampler.findInputSlot('cp_config'));
}"""
RUN = "queue-button"


@NODES_2
def test_both_samplers_say_the_seconds_from_their_first_step_to_the_last_and_start_and_load_apart(page: Any) -> None:
    page.evaluate(OPEN, json.loads(EXAMPLE.read_text()))
    page.evaluate(LISTEN)
    page.evaluate(STEPS)
    page.get_by_test_id(RUN).click()
    page.wait_for_function("window.heard.end", timeout=RUN_MILLISECONDS)
    page.wait_for_function(f"Object.values(({LINES})()).filter(line => line.includes('12 steps')).length === 2")
    lines, steps = page.evaluate(LINES), page.evaluate("window.steps")
    for node, line in lines.items():
        (first, began), (last, ended) = steps[node][0], steps[node][-1]
        said = re.fullmatch(r"(ComfyUI alone|1 CPU worker): 12 steps, ([\d.]+) s each(, .* for start and load)?", line)
        assert said, line
        assert abs(float(said[2]) - (ended - began) / (last - first)) < 0.011, line
    assert sorted(line.partition(":")[0] for line in lines.values()) == ["1 CPU worker", "ComfyUI alone"]
    assert all("for start and load" in line for line in lines.values() if "CPU worker" in line)
    assert page.evaluate(CUT) == [], "the end of a line is cut off"


@BOTH
def test_an_approximate_run_says_so_first_what_is_left_and_where_it_was_cancelled(page: Any, server: Server) -> None:
    put_sampler(page, "CPSampler", steps=2000)
    page.evaluate(CONFIGURE, {"devices": "cpu", "step_cache": 0.01})
    page.get_by_test_id(RUN).click()
    page.wait_for_function(
        f"/^\\d+ of 2000, .* left, approximate, .* s each, 1 CPU worker$/.test(({LINE})())", timeout=RUN_MILLISECONDS
    )
    server.client.post("/cp/stop")
    page.wait_for_function(f"/^1 CPU worker: cancelled at step \\d+ of 2000$/.test(({LINE})())")


def test_a_native_run_that_ended_early_has_no_time(page: Any, server: Server) -> None:
    put_sampler(page, steps=5000)
    page.evaluate("() => app.graph.add(LiteGraph.createNode('CPSampler'))")
    page.evaluate(STEPS)
    page.get_by_test_id(RUN).click()
    page.wait_for_function("Object.keys(window.steps).length", timeout=RUN_MILLISECONDS)
    page.evaluate(LISTEN)
    page.evaluate("() => app.api.addEventListener('execution_interrupted', () => { window.heard.end = 'cut' })")
    page.evaluate("() => app.api.interrupt()")
    page.wait_for_function("window.heard.end")
    page.wait_for_timeout(300)
    assert page.evaluate(LINES) == {}
