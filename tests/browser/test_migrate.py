"""A native sampler becomes a CP node by one click, anywhere in a workflow, and comes back by one undo or by one click;
the latent is the same."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from parallel_runtime.commands.migrate import migrated

from ..comfyui.latents import apart, saved_latents
from ..comfyui.server import Server
from .comfyui_page import TOAST
from .graphs import LATENT, LOADER, put, put_sampler, title, wait_until_drawn
from .graphs import PROMPT as TEXT
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
COVERED = """() => {
    const clip = app.graph.nodes.find(node => node.type === 'CPCLIP');
    const before = (a, b) => [0, 1].some(axis => a.pos[axis] + a.size[axis] <= b.pos[axis]);
    const covers = node => node !== clip && !before(node, clip) && !before(clip, node);
    return app.graph.nodes.filter(covers).map(node => node.type);
}"""
SEEN = "() => { app.extensionManager.workflow.activeWorkflow.changeTracker.checkState?.(); }"
SUBGRAPH = """() => {
    const sampler = app.graph.nodes.find(node => node.type === 'KSampler');
    const { node } = app.graph.convertToSubgraph(new Set([sampler]));
    node.pos = [420, 0];
    const inner = node.subgraph.nodes[0];
    const slot = node.subgraph.addInput('steps', 'INT');
    slot.connect(inner.inputs[inner.findInputSlot('steps')], inner);
    node.widgets.find(widget => widget.name === 'steps').value = 7;
    app.canvas.deselectAll();
}"""  # with one of its widgets on the outside, where its value is another one than inside
HOST = """() => {
    const host = app.graph.nodes.find(node => node.subgraph);
    const { scale, offset } = app.canvas.ds, { x, y } = app.canvas.canvas.getBoundingClientRect();
    return [x + (host.pos[0] + 60 + offset[0]) * scale, y + (host.pos[1] - 15 + offset[1]) * scale];
}"""
INNER = "() => app.graph.nodes.find(node => node.subgraph).subgraph.nodes.map(node => [node.id, node.type])"
COMMAND = "name => app.extensionManager.command.execute(`CPSampler.${name}`)"
NOTICE = f"words => [...document.querySelectorAll('{TOAST}')].some(one => one.textContent.includes(words))"
SELECT = "() => app.canvas.select(app.graph.nodes.find(node => node.type === 'KSampler'))"


def plain(prompt: dict[str, Any]) -> list[str]:
    """What a prompt computes, whatever its nodes are numbered."""

    def value(linked: Any) -> Any:
        return [prompt[linked[0]]["class_type"], linked[1]] if isinstance(linked, list) else linked

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


@BOTH
def test_a_sampler_of_a_pack_gets_a_cp_model_before_it_and_loses_it_again(page: Any, server: Server) -> None:
    kind = "CPTestPackKSampler"
    links = [
        [0, 0, 3, "model"],
        [1, 0, 3, "positive"],
        [1, 0, 3, "negative"],
        [2, 0, 3, "latent"],
        [3, 0, 4, "samples"],
    ]
    put(
        page,
        [LOADER, TEXT, LATENT, [kind, 420, 200, {"seed": 5}], ["CPTestSaveLatent", 760, 0, {"name": "clicked"}]],
        links,
    )
    page.evaluate(ADD_CONFIG)
    wait_until_drawn(page)
    native = page.evaluate(PROMPT)
    page.mouse.click(*title(page, kind), button="right")
    page.get_by_text(ENTRY, exact=True).last.click()
    page.wait_for_function(f"({KINDS})().includes('CPModel')")
    ours = page.evaluate(PROMPT)
    (made,) = [name for name, call in ours.items() if call["class_type"] == "CPModel"]
    (sampler,) = [call["inputs"] for call in ours.values() if call["class_type"] == kind]
    (config,) = [name for name, call in ours.items() if call["class_type"] == "CPParallelConfig"]
    assert sampler["model"] == [made, 0]
    assert ours[made]["inputs"]["cp_config"] == [config, 0]
    ours[config]["inputs"]["devices"] = "cpu,cpu"
    since = server.log_size()
    (want,), (got,) = (saved_latents(server.client.run(prompt)).values() for prompt in (native, ours))
    assert apart(got, want) <= 1e-4
    assert "FLUX on 2 worker(s): sampled in" in server.log(since)

    page.keyboard.press("Escape")
    page.mouse.click(*title(page, kind), button="right")
    page.get_by_text(f"Back to {kind}", exact=True).last.click()
    page.wait_for_function(f"!({KINDS})().includes('CPModel')")
    assert plain(page.evaluate(PROMPT)) == plain(native)


@pytest.fixture
def large(server: Server) -> Iterator[str]:
    """A text encoder's file of 5 GB, of which there is nothing on the disk."""
    file = server.base / "models" / "text_encoders" / "large.safetensors"
    file.parent.mkdir(exist_ok=True)
    file.touch()
    os.truncate(file, 5 * 10**9)
    yield file.name
    file.unlink()


@BOTH
def test_a_large_text_encoder_gets_a_cp_clip_and_loses_it_on_the_way_back(page: Any, large: str) -> None:
    nodes = [
        LOADER,
        ["CLIPLoader", 0, 160, {"clip_name": large, "type": "flux2"}],
        ["VAELoader", 0, 340, {}],
        ["CLIPTextEncode", 340, 0, {"text": "a fox"}],
        ["CLIPTextEncode", 340, 300, {"text": "blurry"}],
        LATENT,
        ["KSampler", 780, 0, {"seed": 5}],
    ]
    links = [
        [1, 0, 3, "clip"], [1, 0, 4, "clip"], [0, 0, 6, "model"], [3, 0, 6, "positive"], [4, 0, 6, "negative"],
        [5, 0, 6, "latent_image"],
    ]  # fmt: skip
    nodes[5] = [LATENT[0], 0, 520, LATENT[3]]
    put(page, nodes, links)
    page.evaluate(ADD_CONFIG)
    wait_until_drawn(page)
    native = page.evaluate(PROMPT)
    page.evaluate(COMMAND, "MigrateAll")
    page.wait_for_function(f"({KINDS})().includes('CPSampler')")
    page.wait_for_function(f"({KINDS})().includes('CPCLIP')")
    wait_until_drawn(page)
    ours = page.evaluate(PROMPT)
    by_kind = {
        kind: [name for name, call in ours.items() if call["class_type"] == kind]
        for kind in ("CPCLIP", "CLIPLoader", "CPParallelConfig")
    }
    (made,), (loader,), (config,) = by_kind.values()
    assert [call["inputs"]["clip"] for call in ours.values() if call["class_type"] == "CLIPTextEncode"] == [
        [made, 0]
    ] * 2
    assert ours[made]["inputs"] == {"clip": [loader, 0], "cp_config": [config, 0]}
    assert page.evaluate(COVERED) == [], "it lies on no other node"
    assert plain(ours) == plain(migrated(native, large=lambda names: large in names)[0]), "as by the command"

    page.evaluate(COMMAND, "MigrateAllBack")
    page.wait_for_function(f"!({KINDS})().includes('CPCLIP')")
    page.wait_for_function(f"({KINDS})().includes('KSampler')")
    assert plain(page.evaluate(PROMPT)) == plain(native)


@BOTH
def test_a_large_text_encoder_of_cp_load_clip_gets_no_cp_clip(page: Any, large: str) -> None:
    put(page, [["CPLoadCLIP", 0, 160, {"clip_name1": large}], ["CLIPTextEncode", 340, 0, {"text": "a fox"}],
        ["KSampler", 700, 0, {}]], [[0, 0, 1, "clip"], [1, 0, 2, "positive"]])  # fmt: skip
    page.evaluate(COMMAND, "MigrateAll")
    page.wait_for_function(f"({KINDS})().includes('CPSampler')")
    assert "CPCLIP" not in page.evaluate(KINDS)


def test_a_small_text_encoder_stays_with_comfyui(page: Any) -> None:
    put(page, [["CLIPLoader", 0, 160, {}], ["CLIPTextEncode", 340, 0, {"text": "a fox"}], ["KSampler", 700, 0, {}]],
        [[0, 0, 1, "clip"], [1, 0, 2, "positive"]])  # fmt: skip
    page.evaluate(COMMAND, "MigrateAll")
    page.wait_for_function(f"({KINDS})().includes('CPSampler')")
    assert "CPCLIP" not in page.evaluate(KINDS)


@BOTH
def test_a_sampler_in_a_subgraph_is_changed_from_outside_and_changed_back_after_a_reload(page: Any) -> None:
    put_sampler(page)
    page.evaluate(SUBGRAPH)
    wait_until_drawn(page)
    page.evaluate(SEEN)
    native, ((number, _),) = page.evaluate(PROMPT), page.evaluate(INNER)
    page.mouse.click(*page.evaluate(HOST), button="right")
    page.get_by_text(ENTRY, exact=True).last.click()
    page.wait_for_function(f"({INNER})()[0][1] === 'CPSampler'")
    page.wait_for_function(NOTICE, arg="1 sampler changed: it runs on several GPUs")
    ours = page.evaluate(PROMPT)
    assert plain(ours) == plain(migrated(native)[0]), "the value of the widget outside is kept too"
    assert any(call["inputs"].get("steps") == 7 for call in ours.values())
    assert page.evaluate(INNER) == [[number, "CPSampler"]], "subgraphs and apps refer to nodes by number"

    page.evaluate("async () => app.loadGraphData(app.graph.serialize())")
    wait_until_drawn(page)
    page.mouse.click(*page.evaluate(HOST), button="right")
    page.get_by_text("Back to KSampler", exact=True).last.click()
    page.wait_for_function(f"({INNER})()[0][1] === 'KSampler'")
    assert plain(page.evaluate(PROMPT)) == plain(native)


def test_all_samplers_of_a_workflow_are_one_command_and_one_undo(page: Any) -> None:
    put_sampler(page)
    page.evaluate(SUBGRAPH)
    page.evaluate("() => app.graph.add(LiteGraph.createNode('SamplerCustom'))")
    page.evaluate(SEEN)
    before = page.evaluate(KINDS)
    page.evaluate(COMMAND, "MigrateAll")
    page.wait_for_function(NOTICE, arg="2 samplers changed: they run on several GPUs")
    assert "CPSamplerCustomBasic" in page.evaluate(KINDS)
    assert [kind for _, kind in page.evaluate(INNER)] == ["CPSampler"]
    page.keyboard.press("Escape")
    page.keyboard.press("Control+z")
    page.wait_for_function(f"({INNER})()[0][1] === 'KSampler'")
    assert sorted(page.evaluate(KINDS)) == sorted(before)
    page.evaluate(COMMAND, "Migrate")  # with nothing selected, it is about all
    assert "SamplerCustom" not in page.evaluate(KINDS)
    page.evaluate(COMMAND, "MigrateAllBack")
    page.wait_for_function(NOTICE, arg="2 samplers changed back to KSampler")
    assert sorted(page.evaluate(KINDS)) == sorted(before)


@BOTH
def test_the_empty_canvas_offers_what_there_is_to_change(page: Any) -> None:
    put_sampler(page)
    entry, back = (
        "All samplers of this workflow: run on several GPUs",
        "All samplers of this workflow: back to KSampler",
    )
    page.mouse.click(700, 900, button="right")
    page.get_by_text(entry).wait_for()
    assert page.get_by_text(back).count() == 0
    page.get_by_text(entry).click()
    page.wait_for_function(f"({KINDS})().includes('CPSampler')")
    page.mouse.click(700, 900, button="right")
    page.get_by_text(back).click()
    page.wait_for_function(f"({KINDS})().includes('KSampler')")


def test_a_workflow_without_samplers_is_said(page: Any) -> None:
    put(page, [LOADER])
    page.evaluate(COMMAND, "Migrate")
    page.wait_for_function(NOTICE, arg="No sampler to change")


def test_a_way_back_without_the_config_keeps_reroutes_and_titles(page: Any) -> None:
    put_sampler(page, "CPSampler")
    page.evaluate(ADD_CONFIG)
    page.evaluate(
        """() => {
            const sampler = app.graph.nodes.find(node => node.type === 'CPSampler');
            sampler.title = 'Mine';
            const config = app.graph.nodes.find(node => node.type === 'CPParallelConfig');
            config.connect(0, sampler, sampler.findInputSlot('cp_config'));
            app.graph.createReroute([300, 40], app.graph.getLink(sampler.inputs[0].link));
            app.canvas.select(sampler);
        }"""
    )
    page.evaluate(COMMAND, "MigrateBack")
    sampler = "app.graph.nodes.find(node => node.type === 'KSampler')"
    assert page.evaluate(f"() => {sampler}.title") == "Mine"
    assert page.evaluate("() => [...app.graph.reroutes.values()].map(one => [...one.pos])") == [[300, 40]]
    assert (
        page.evaluate("() => app.graph.nodes.find(one => one.type === 'CPParallelConfig').outputs[0].links ?? []") == []
    )
    inputs = page.evaluate(f"() => {sampler}.inputs.filter(one => one.link != null).map(one => one.name)")
    assert sorted(inputs) == ["latent_image", "model", "negative", "positive"]
