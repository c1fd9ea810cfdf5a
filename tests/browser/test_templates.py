"""Every workflow of example_workflows/ opens in ComfyUI's page as its author meant it, and is good to run but for the
files that this machine lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ..comfyui.client import NodeError
from ..comfyui.server import Server
from .comfyui_page import EXAMPLE, OPEN
from .graphs import wait_until_drawn
from .renderers import NODES_2
from .templates.catalogue import templates
from .templates.edits import EXAMPLE as PICTURE
from .templates.graph import Link, Node, Template

FOLDER = EXAMPLE.parent
MADE = [template for template in templates() if (FOLDER / f"{template.file}.json").is_file()]
DYNAMIC = {"format", "codec"}
OVERLAPS = """() => {
    const drawn = node => document.querySelector(`[data-node-id="${node.id}"]`).getBoundingClientRect();
    const box = node => LiteGraph.vueNodesMode
        ? [drawn(node).x, drawn(node).y, drawn(node).width, drawn(node).height]
        : [node.pos[0], node.pos[1] - 30, node.size[0], node.size[1] + 30];
    return app.graph.nodes.flatMap((one, index, all) => all.slice(index + 1).filter(other => {
        const [a, b] = [box(one), box(other)];
        return a[0] < b[0] + b[2] && b[0] < a[0] + a[2] && a[1] < b[1] + b[3] && b[1] < a[1] + a[3];
    }).map(other => [one.title, other.title]));
}"""
LISTED = """prefix => [...document.querySelectorAll(`[data-testid^="${prefix}"]`)]
    .map(card => card.dataset.testid.replace(prefix, ''))"""
CARD = "template-workflow-"
PROMPT = "async () => (await app.graphToPrompt()).output"


def test_all_of_them_are_there_with_a_thumbnail() -> None:
    assert {template.name for template in templates()} == {template.name for template in MADE}
    for path in FOLDER.glob("*.json"):
        assert path.with_suffix(".jpg").stat().st_size > 4000, path.name


@pytest.mark.parametrize("template", MADE, ids=lambda template: template.name)
def test_a_note_names_every_file_and_where_it_goes(template: Template) -> None:
    nodes = json.loads((FOLDER / f"{template.file}.json").read_text())["nodes"]
    (note,) = (node["widgets_values"][0] for node in nodes if node["type"] == "MarkdownNote")
    assert template.files
    for file in template.files:
        assert f"**models/{file.folder}/** [{file.name}](https://huggingface.co/" in note


def test_they_are_listed_by_their_numbers_the_demo_first(page: Any) -> None:
    page.evaluate("() => app.extensionManager.command.execute('Comfy.BrowseTemplates')")
    page.get_by_text("context-parallel-sampler").first.click()
    page.wait_for_selector(f'[data-testid="{CARD}{Path(EXAMPLE).stem}"]')
    listed = page.evaluate(LISTED, CARD)
    assert listed[0] == Path(EXAMPLE).stem
    assert listed == sorted(listed)


@NODES_2
def test_none_of_their_nodes_overlap_in_nodes_2_either(page: Any) -> None:
    for path in sorted(FOLDER.glob("*.json")):
        page.evaluate(OPEN, json.loads(path.read_text()))
        wait_until_drawn(page)
        assert page.evaluate(OVERLAPS) == [], path.name


def test_every_workflow_opens_whole_and_could_be_queued(page: Any, server: Server) -> None:
    Image.new("RGB", (64, 48)).save(server.base / "input" / PICTURE)  # every ComfyUI comes with one
    known = server.client.get("/object_info")
    for template in MADE:
        page.evaluate(OPEN, json.loads((FOLDER / f"{template.file}.json").read_text()))
        prompt = page.evaluate(PROMPT)
        assert as_opened(prompt) == as_meant(template, known), template.name
        assert page.evaluate(OVERLAPS) == [], template.name
        assert only_files_are_missing(server, prompt, template), template.name


def as_meant(template: Template, known: dict[str, Any]) -> list[tuple[str, str]]:
    """Every node with its inputs: those that its author set, and the usual values of the others. A widget that has
    shifted shows here."""

    def plain(value: Any) -> Any:
        link = value[0] if isinstance(value, Node) else value
        if isinstance(link, Link):
            return [link.node.kind, link.slot]
        return getattr(value, "name", value)

    return sorted(
        (node.kind, as_text({**usual(known[node.kind]), **{name: plain(node.inputs[name]) for name in node.inputs}}))
        for node in template.nodes
    )


def usual(info: dict[str, Any]) -> dict[str, Any]:
    """The defaults of the widgets that have one."""
    given = [spec for part in ("required", "optional") for spec in info["input"].get(part, {}).items()]
    named = {name: spec[1] for name, spec in given if len(spec) > 1}
    choices = {
        name: spec[0] if isinstance(spec[0], list) else named.get(name, {}).get("options") for name, spec in given
    }
    first = {name: options[0] for name, options in choices.items() if options and isinstance(options[0], str)}
    return first | {
        name: more["default"] for name, more in named.items() if "default" in more and not more.get("forceInput")
    }


def as_opened(prompt: dict[str, Any]) -> list[tuple[str, str]]:
    """The same of what ComfyUI would run."""

    def plain(value: Any) -> Any:
        return [prompt[value[0]]["class_type"], value[1]] if isinstance(value, list) else value

    return sorted(
        (call["class_type"], as_text({name: plain(value) for name, value in call["inputs"].items()}))
        for call in prompt.values()
    )


def as_text(inputs: dict[str, Any]) -> str:
    """Dynamic inputs, such as a video's format and what hangs on it, are ComfyUI's own affair. A page has one kind of
    numbers: 1.0 is 1."""
    own = {name: value for name, value in inputs.items() if name.split(".")[0] not in DYNAMIC}
    whole = {name: int(value) for name, value in own.items() if isinstance(value, float) and value.is_integer()}
    return json.dumps(own | whole, sort_keys=True)


def only_files_are_missing(server: Server, prompt: dict[str, Any], template: Template) -> bool:
    missing = {file.name for file in template.files}
    try:
        server.client.queue(prompt)
    except NodeError as refused:
        answer = json.loads(str(refused))
        for node in answer["node_errors"].values():
            for error in node["errors"]:
                assert error["type"] == "value_not_in_list", error
                assert error["extra_info"]["received_value"] in missing, error
        return True
    raise AssertionError("a workflow without its files was taken")


def test_the_demo_is_not_among_those_made_here() -> None:
    assert Path(EXAMPLE).stem not in {template.name for template in MADE}
