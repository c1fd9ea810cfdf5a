"""A native sampler becomes a CP node by one click, and comes back by one undo; the latent is the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from parallel_runtime.commands.migrate import migrated

from ..comfyui.latents import apart, saved_latents
from ..comfyui.server import Server
from .graphs import put_sampler, title, wait_until_drawn
from .renderers import BOTH

KINDS = "() => app.graph.nodes.map(node => node.type)"
SAVED = "() => app.graph.serialize()"
PROMPT = "async () => (await app.graphToPrompt()).output"
ENTRY = "Run on several GPUs"
ADD_CONFIG = """() => {
    const node = LiteGraph.createNode('CPParallelConfig');
    node.pos = [0, 500];
    app.graph.add(node);
}"""
SEEN = "() => { app.extensionManager.workflow.activeWorkflow.changeTracker.checkState?.(); }"
SELECT = "() => app.canvas.select(app.graph.nodes.find(node => node.type === 'KSampler'))"


def plain(prompt: dict[str, Any]) -> list[str]:
    """What a prompt computes, whatever its nodes are numbered."""

    def value(found: Any) -> Any:
        return [prompt[found[0]]["class_type"], found[1]] if isinstance(found, list) else found

    calls = (
        {"class": call["class_type"], **{k: value(v) for k, v in call["inputs"].items()}} for call in prompt.values()
    )
    return sorted(json.dumps(call, sort_keys=True) for call in calls)


@BOTH
def test_a_click_swaps_the_node_as_the_command_does_and_undo_brings_it_back(page: Any, server: Server) -> None:
    put_sampler(page, sampler_name="dpmpp_2m", denoise=0.75)
    native_prompt = page.evaluate(PROMPT)
    by_command, changes = migrated(page.evaluate(SAVED))
    assert len(changes) == 1
    page.mouse.click(*title(page, "KSampler"), button="right")
    page.get_by_text(ENTRY, exact=True).last.click()
    page.wait_for_function(f"({KINDS})().includes('CPSampler')")
    assert "KSampler" not in page.evaluate(KINDS)
    ours_prompt = page.evaluate(PROMPT)
    assert plain(ours_prompt) == plain(migrated(native_prompt)[0])
    (native,), (ours,) = (saved_latents(server.client.run(prompt)).values() for prompt in (native_prompt, ours_prompt))
    assert apart(ours, native) <= 1e-4

    page.keyboard.press("Escape")
    page.keyboard.press("Control+z")
    page.wait_for_function(f"!({KINDS})().includes('CPSampler')")
    assert plain(page.evaluate(PROMPT)) == plain(native_prompt)

    page.evaluate("async workflow => app.loadGraphData(workflow)", by_command)
    assert plain(page.evaluate(PROMPT)) == plain(ours_prompt)


@pytest.mark.parametrize("kind", ["KSamplerAdvanced", "SamplerCustomAdvanced", "SamplerCustom"])
def test_the_other_samplers_keep_every_widget_and_link(page: Any, kind: str) -> None:
    page.evaluate(
        """kind => {
            app.graph.clear();
            const node = LiteGraph.createNode(kind);
            node.title = 'Mine';
            node.color = '#335';
            app.graph.add(node);
            for (const [index, widget] of (node.widgets ?? []).entries()) {
                if (widget.type === 'number') widget.value = 3 + index;
            }
            for (const input of [...node.inputs].filter(input => !input.widget)) {
                const reroute = LiteGraph.createNode('Reroute');
                app.graph.add(reroute);
                reroute.connect(0, node, node.findInputSlot(input.name));
            }
            app.canvas.select(node);
        }""",
        kind,
    )
    state = """() => {
        const node = app.graph.nodes.find(node => node.title === 'Mine');
        const links = node.inputs.filter(input => input.link != null).map(input => input.name);
        return [links.sort(), (node.widgets ?? []).map(widget => [widget.name, widget.value]), node.color];
    }"""
    before = page.evaluate(state)
    page.evaluate("() => app.extensionManager.command.execute('CPSampler.Migrate')")
    assert page.evaluate(state) == before
    assert kind not in page.evaluate(KINDS)


def test_the_config_that_is_there_is_connected_and_undo_takes_both_back(page: Any) -> None:
    put_sampler(page)
    page.evaluate(ADD_CONFIG)
    page.wait_for_selector(".cp-what:not(:empty)")  # it is as large as what it says
    wait_until_drawn(page)
    page.evaluate(SEEN)
    before = page.evaluate(KINDS)
    by_command, _ = migrated(page.evaluate(SAVED))
    page.evaluate(SELECT)
    page.evaluate("() => app.extensionManager.command.execute('CPSampler.Migrate')")
    config = "() => app.graph.nodes.find(node => node.type === 'CPSampler')?.getInputNode(4)?.type"
    assert page.evaluate(config) == "CPParallelConfig"
    by_click = plain(page.evaluate(PROMPT))
    page.keyboard.press("Escape")
    page.keyboard.press("Control+z")
    page.wait_for_function(f"!({KINDS})().includes('CPSampler')")
    assert sorted(page.evaluate(KINDS)) == sorted(before)
    links = "() => app.graph.nodes.find(one => one.type === 'CPParallelConfig').outputs[0].links ?? []"
    assert page.evaluate(links) == []

    page.evaluate("async workflow => app.loadGraphData(workflow)", by_command)
    assert plain(page.evaluate(PROMPT)) == by_click
