"""Every example workflow opens: its node types exist, its links are sane, its widgets fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .comfy import OUR_ROOT
from .server import Server

WORKFLOWS = sorted((OUR_ROOT / "example_workflows").glob("*.json"))
DRAWN_BY_THE_FRONTEND = {"Note", "MarkdownNote", "Reroute", "PrimitiveNode"}


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.stem)
def workflow(request: pytest.FixtureRequest) -> dict[str, Any]:
    return json.loads(Path(request.param).read_text())


@pytest.fixture(scope="module")
def info(shared_server: Server) -> dict[str, Any]:
    """Every node as ComfyUI describes it."""
    return shared_server.client.get("/object_info")


def test_there_are_example_workflows() -> None:
    assert WORKFLOWS


def test_its_nodes_exist(info: dict[str, Any], workflow: dict[str, Any]) -> None:
    known = {*info, *DRAWN_BY_THE_FRONTEND, *_subgraphs(workflow)}
    inner = [node for graph in _subgraphs(workflow).values() for node in graph["nodes"]]
    assert {node["type"] for node in [*workflow["nodes"], *inner]} <= known


def test_its_links_join_sockets_that_know_of_them(workflow: dict[str, Any]) -> None:
    nodes = {node["id"]: node for node in workflow["nodes"]}
    for link, source, out, target, into, kind in workflow["links"]:
        output, socket = nodes[source]["outputs"][out], nodes[target]["inputs"][into]
        assert link in output["links"]
        assert socket["link"] == link
        assert kind in (output["type"], "*")
        assert output["type"] == socket["type"] or "*" in (output["type"], socket["type"])
    known = {link[0] for link in workflow["links"]}
    used = {socket["link"] for node in workflow["nodes"] for socket in node.get("inputs", ()) if socket.get("link")}
    assert used == known


def test_the_sockets_of_our_nodes_are_those_they_declare(info: dict[str, Any], workflow: dict[str, Any]) -> None:
    for node in workflow["nodes"]:
        if node["type"].startswith("CP"):
            inputs = _inputs(info[node["type"]])
            assert {socket["name"] for socket in node.get("inputs", ())} <= set(inputs), node["type"]
            assert [socket["type"] for socket in node.get("outputs", ())] == info[node["type"]]["output"]


def test_the_widgets_of_our_nodes_fit(info: dict[str, Any], workflow: dict[str, Any]) -> None:
    for node in workflow["nodes"]:
        if node["type"].startswith("CP"):
            widgets = _widgets(info[node["type"]])
            values = node.get("widgets_values", [])
            assert len(values) == len(widgets), f"{node['type']}: {values} for {list(widgets)}"
            for (name, declared), value in zip(widgets.items(), values, strict=True):
                assert _fits(declared, value), f"{node['type']}.{name} = {value!r}"


def _subgraphs(workflow: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {graph["id"]: graph for graph in workflow.get("definitions", {}).get("subgraphs", ())}


def _inputs(info: dict[str, Any]) -> dict[str, list[Any]]:
    return {**info["input"].get("required", {}), **info["input"].get("optional", {})}


def _widgets(info: dict[str, Any]) -> dict[str, list[Any]]:
    """In the order of `widgets_values`: after a seed the frontend adds what happens to it after a run."""
    widgets: dict[str, list[Any]] = {}
    for name, declared in _inputs(info).items():
        if isinstance(declared[0], list) or declared[0] in ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO"):
            widgets[name] = declared
            if len(declared) > 1 and declared[1].get("control_after_generate"):
                widgets[f"{name}, then"] = [["fixed", "increment", "decrement", "randomize"]]
    return widgets


def _fits(declared: list[Any], value: object) -> bool:
    kind, options = declared[0], declared[1] if len(declared) > 1 else {}
    choices = kind if isinstance(kind, list) else options.get("options")
    if choices is not None:
        return value in choices or str(value).endswith(".safetensors")  # a file that is not here
    if isinstance(value, bool) or kind == "BOOLEAN":
        return isinstance(value, bool) and kind == "BOOLEAN"
    if isinstance(value, (int, float)):
        return kind in ("INT", "FLOAT") and options.get("min", value) <= value <= options.get("max", value)
    return kind == "STRING" and isinstance(value, str)
