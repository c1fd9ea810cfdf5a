"""A run that was refused says why on the page, and leads to the node whose values have to change."""

from __future__ import annotations

from typing import Any

from ..comfyui.server import Server
from .comfyui_page import TOAST
from .graphs import TEXT, put_sampler
from .renderers import BOTH

SELECTED = "() => [...app.canvas.selectedItems].map(node => node.type)"
CONFIG = """() => {
    const config = LiteGraph.createNode('CPParallelConfig');
    const sampler = app.graph.nodes.find(one => one.type === 'CPSampler');
    config.pos = [3000, 3000];
    app.graph.add(config);
    const values = { ring_degree: 3, ulysses_degree: 1, devices: 'cpu,cpu' };
    for (const widget of config.widgets) if (widget.name in values) widget.value = values[widget.name];
    config.connect(0, sampler, sampler.findInputSlot('cp_config'));
}"""
COUNT_OVERLAYS = """async () => {
    await app.loadGraphData(app.graph.serialize());
    window.overlays = 0;
    let shown = Boolean(document.querySelector('[data-testid="error-overlay"]'));
    new MutationObserver(() => {
        const now = Boolean(document.querySelector('[data-testid="error-overlay"]'));
        window.overlays += now && !shown;
        shown = now;
    }).observe(document.body, { childList: true, subtree: true });
}"""
TAKEN_BACK = """times => window.overlays === times && !document.querySelector('[data-testid="error-overlay"]')"""
SHOWN_TWICE = "() => window.overlays === 2"
SEVERAL_LOOKS = """() => new Promise(done => {
    let looks = 0;
    const timer = setInterval(() => { if (++looks === 10) { clearInterval(timer); done(); } }, 50);
})"""  # at the page's own pace, as web/refusals.js looks for ComfyUI's message
ONE_TOAST = """selector => [...document.querySelectorAll(selector)]
    .filter(one => one.textContent.includes('The run was refused')).length === 1"""
ANOTHER_ERROR = """() => {
    const { id, type } = app.graph.nodes.find(node => node.type === 'CPSampler');
    window.app.api.dispatchCustomEvent('execution_error', {
        prompt_id: 'another', node_id: String(id), node_type: type, executed: [], exception_type: 'KeyError',
        exception_message: 'another error', traceback: [], current_inputs: {}, current_outputs: {}, timestamp: 0,
    });
}"""
PROMPT = "text => { app.graph.nodes.find(one => one.type === 'CPTestConditioning').widgets[0].value = text }"
IN_SIGHT = """kind => {
    const { pos, size } = app.graph.nodes.find(node => node.type === kind);
    const [x, y, wide, high] = app.canvas.ds.visible_area;
    return pos[0] < x + wide && x < pos[0] + size[0] && pos[1] < y + high && y < pos[1] + size[1];
}"""


def count_overlays(page: Any) -> None:
    """Counts ComfyUI's messages from now on, in a workflow of its own: of the one that the page opens with, ComfyUI may
    still be about to say that its models are missing."""
    page.evaluate(COUNT_OVERLAYS)


HEAR = "() => app.api.addEventListener('cp.refused', event => { window.refusal = event.detail; })"
AGAIN = "() => app.api.dispatchEvent(new CustomEvent('cp.refused', { detail: window.refusal }))"


def test_a_refusal_leads_to_no_node_of_another_workflow(page: Any) -> None:
    """Another tab has nodes of the same numbers."""
    put_sampler(page, kind="CPSampler")
    page.evaluate(CONFIG)
    page.evaluate(HEAR)
    page.get_by_test_id("queue-button").click()
    page.wait_for_function("window.refusal")
    page.get_by_role("button", name="Show CP Parallel Config").wait_for()
    page.evaluate("async () => app.loadGraphData({ ...app.graph.serialize(), id: crypto.randomUUID() })")
    page.evaluate(AGAIN)
    page.get_by_role("button", name="Show GPU workers").wait_for()
    page.get_by_role("button", name="Show CP Parallel Config").wait_for(state="detached")  # of the toast before
    assert "ring_degree 3" in page.locator(TOAST).last.inner_text()


def test_a_script_without_a_client_is_refused_on_no_page(page: Any, server: Server) -> None:
    put_sampler(page, kind="CPSampler")
    page.evaluate(CONFIG)
    page.evaluate(HEAR)
    done = page.evaluate(
        """async () => {
            const { output } = await app.graphToPrompt();
            const body = JSON.stringify({ prompt: output });
            const { prompt_id: id } = await (await app.api.fetchApi('/prompt', { method: 'POST', body })).json();
            for (;;) {
                const past = await (await app.api.fetchApi(`/history/${id}`)).json();
                if (past[id]) return past[id].status.status_str;
                await new Promise(again => setTimeout(again, 100));
            }
        }"""
    )
    assert done == "error"
    page.wait_for_timeout(500)
    assert page.evaluate("window.refusal") is None


@BOTH
def test_a_click_selects_the_config_that_cannot_work(page: Any) -> None:
    put_sampler(page, kind="CPSampler")
    page.evaluate(CONFIG)
    count_overlays(page)
    page.get_by_test_id("queue-button").click()
    toast = page.locator(TOAST).filter(has_text="The run was refused")
    toast.wait_for()
    assert "ring_degree 3 x ulysses_degree 1 needs 3 workers" in toast.inner_text()
    page.wait_for_function(TAKEN_BACK, arg=1)  # else the same run is told of twice
    assert toast.is_visible()
    page.get_by_role("button", name="Show CP Parallel Config").click()
    assert page.evaluate(SELECTED) == ["CPParallelConfig"]
    page.wait_for_function(IN_SIGHT, arg="CPParallelConfig")
    page.get_by_test_id("queue-button").click()
    page.wait_for_function(TAKEN_BACK, arg=2)
    page.wait_for_function(ONE_TOAST, arg=TOAST)  # of the last refusal, and none before it
    page.get_by_role("button", name="Use ring_degree 2").click()
    page.wait_for_function("selector => !document.querySelector(selector)", arg=".cp-toast, .cp-bad")
    assert toast.count() == 0


def test_without_another_node_to_blame_it_leads_to_the_one_that_refused(page: Any) -> None:
    put_sampler(page, kind="CPSampler")
    page.evaluate(PROMPT, TEXT.replace("128", "64"))
    count_overlays(page)
    page.get_by_test_id("queue-button").click()
    page.wait_for_function(TAKEN_BACK, arg=1)
    page.evaluate(ANOTHER_ERROR)
    page.wait_for_function(SHOWN_TWICE)
    page.evaluate(SEVERAL_LOOKS)
    assert page.get_by_test_id("error-overlay").count() == 1, "an error of something else was taken away, too"
    page.get_by_role("button", name="Show CP Sampler").click()
    assert page.evaluate(SELECTED) == ["CPSampler"]
