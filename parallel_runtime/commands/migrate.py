"""Replaces native samplers by CP nodes in a saved workflow or an API prompt; with --back, CP nodes by native samplers.
Needs no ComfyUI.

A CP node has its native node's sockets and widgets, so no value changes. If a graph has one CP Parallel Config, its new
CP nodes are connected to it, as ComfyUI's page does it. --back leaves the CP Parallel Config in the graph, unconnected,
and this pack's other nodes, and names them.
"""

import argparse
import copy
import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

REPLACEMENTS = {
    "KSampler": "CPSampler",
    "KSamplerAdvanced": "CPSamplerAdvanced",
    "SamplerCustomAdvanced": "CPSamplerCustom",
    "SamplerCustom": "CPSamplerCustomBasic",
}
NATIVE = {ours: native for native, ours in REPLACEMENTS.items()}
CONFIG = "CPParallelConfig"
OTHERS = (
    CONFIG, "CPPlan", "CPCompare", "CPLoadDiffusionModel", "CPModel", "CPVAE", "CPCLIP",
    "CPDemoModel", "CPDemoConditioning", "CPDemoDecode",
)  # fmt: skip
ALWAYS = 0  # the mode of a node that is neither muted nor bypassed
SOCKET = {"name": "cp_config", "type": "CP_CONFIG", "shape": 7, "link": None}  # 7: drawn as optional
LINK = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")  # in a link that is a list
NAME = "Node name for S&R"
ORIGIN = ("cnr_id", "aux_id", "ver")  # which pack a node is of, and which version of it

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SwappedNode:
    """`place` is the subgraph or group node that holds the node, "" for the workflow itself."""

    node: str
    before: str
    after: str
    place: str = ""

    def __str__(self) -> str:
        where = f" in {self.place}" if self.place else ""
        return f"node {self.node}{where}: {self.before} -> {self.after}"


def migrated(workflow: Any, *, back: bool = False) -> tuple[Json, list[SwappedNode]]:
    """Returns a copy of `workflow` with CP nodes, or `back` with native ones, and what was changed. Raises ValueError
    for what is no workflow."""
    workflow, names = copy.deepcopy(workflow), NATIVE if back else REPLACEMENTS
    if not isinstance(workflow, dict):
        raise ValueError(f"a workflow is a JSON object, and this is a {type(workflow).__name__}")
    if isinstance(workflow.get("nodes"), list):
        return workflow, [change for place, graph in _graphs(workflow) for change in _swap_nodes(graph, place, names)]
    calls = workflow.get("prompt") if isinstance(workflow.get("prompt"), dict) else workflow
    if not calls or not all(isinstance(call, dict) and "class_type" in call for call in calls.values()):
        raise ValueError("neither a workflow as ComfyUI saves it (nodes) nor one exported for its API (class_type)")
    configs = [name for name, call in calls.items() if call["class_type"] == CONFIG]
    config = configs[0] if len(configs) == 1 and not back else None
    replaced = [(name, call) for name, call in calls.items() if _is_of(names, call, "class_type")]
    return workflow, [_swap_call(name, call, names, config) for name, call in replaced]


def remaining(workflow: Json) -> list[str]:
    """Returns the nodes of this pack in a workflow that has no CP sampler any more, each with its number."""
    if not isinstance(workflow.get("nodes"), list):
        calls = workflow["prompt"] if isinstance(workflow.get("prompt"), dict) else workflow
        return [f"node {name} ({call['class_type']})" for name, call in calls.items() if call["class_type"] in OTHERS]
    nodes = [(place, node) for place, graph in _graphs(workflow) for node in _items(graph.get("nodes"))]
    named = [(f" in {place}" if place else "", node) for place, node in nodes if node.get("type") in OTHERS]
    return [f"node {node.get('id', node.get('index', '?'))}{where} ({node['type']})" for where, node in named]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m parallel_runtime migrate", description=__doc__)
    parser.add_argument("workflow", type=Path, help="a saved workflow, or - for standard input")
    parser.add_argument("--back", action="store_true", help="replace CP nodes by ComfyUI's own samplers")
    parser.add_argument("-o", "--out", type=Path, help="where to write; otherwise NAME.cp.json, or NAME.native.json")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    from_stdin = str(options.workflow) == "-"
    try:
        text = sys.stdin.read() if from_stdin else options.workflow.read_text(encoding="utf-8")
        result, changes = migrated(json.loads(text), back=options.back)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        log.error("%s is not JSON (%s); give it a workflow that ComfyUI saved", options.workflow, error)
        return 1
    except (OSError, ValueError) as error:
        log.error("%s: %s", options.workflow, getattr(error, "strerror", None) or error)
        return 1
    out = options.out or (Path("-") if from_stdin else _default_out(options.workflow, options.back))
    for change in changes:
        log.info("%s", change)
    if options.back and (left := remaining(result)):
        log.info("this pack's nodes that are left: %s; take them out, or keep the pack", ", ".join(left))
    if not changes:
        kinds = ", ".join(NATIVE if options.back else REPLACEMENTS)
        log.info("there is no %s in it: nothing to change%s", kinds, "" if str(out) == "-" else ", nothing written")
        if str(out) != "-":
            return 0
    if out == options.workflow and options.out is None and not from_stdin:
        log.error("%s would be overwritten; -o names the file to write", out)
        return 1
    try:
        _write(out, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        log.error("%s: %s; -o names another place", out, error.strerror)
        return 1
    return 0


def _default_out(workflow: Path, back: bool) -> Path:
    """Returns the path beside the workflow: its name without an earlier .cp or .native, and with the new one."""
    name = workflow.stem.removesuffix(".cp").removesuffix(".native")
    return workflow.with_name(f"{name}.{'native' if back else 'cp'}.json")


def _write(out: Path, text: str) -> None:
    if str(out) == "-":
        sys.stdout.write(text)
    else:
        how = "writes over" if out.exists() else "written to"
        out.write_text(text, encoding="utf-8")
        log.info("%s %s", how, out)


def _is_of(kinds: dict[str, str], node: Any, key: str) -> bool:
    return isinstance(node, dict) and isinstance(node.get(key), str) and node[key] in kinds


def _graphs(workflow: Json) -> Iterator[tuple[str, Json]]:
    """Yields every graph of nodes and links, with its name: the canvas, a subgraph, an old group node."""
    yield "", workflow
    for subgraph in _items(_under(workflow, "definitions", "subgraphs")):
        yield f"subgraph {subgraph.get('name', '')!r}", subgraph
    groups = _under(workflow, "extra", "groupNodes")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        if isinstance(group, dict):
            yield f"group node {name!r}", group


def _under(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _items(value: Any) -> list[Json]:
    return [item for item in _list(value) if isinstance(item, dict)]


def _swap_nodes(graph: Json, place: str, names: dict[str, str]) -> Iterator[SwappedNode]:
    nodes = _items(graph.get("nodes"))
    configs = [node for node in nodes if node.get("type") == CONFIG and node.get("mode", ALWAYS) == ALWAYS]
    for node in nodes:
        if not _is_of(names, node, "type"):
            continue
        yield _swap_on_canvas(node, names[node["type"]], place)
        if names is NATIVE:
            _disconnect(graph, node)
            continue
        node["inputs"] = [*_list(node.get("inputs")), dict(SOCKET)]
        if len(configs) == 1 and "id" in node:  # a node of an old group has none
            _connect(graph, configs[0], node)


def _disconnect(graph: Json, node: Json) -> None:
    """Removes the cp_config socket of `node` with its link; links to later sockets get their new numbers."""
    sockets = _list(node.get("inputs"))
    index = next((index for index, socket in enumerate(sockets) if _under(socket, "name") == SOCKET["name"]), None)
    if index is None:
        return
    number = _number(sockets.pop(index).get("link"))
    links = graph.get("links")
    if not isinstance(links, list):
        return
    graph["links"] = links = [link for link in links if not number or _number(_of_link(link, "id")) != number]
    for link in links:
        slot = _number(_of_link(link, "target_slot"))
        if "id" in node and _of_link(link, "target_id") == node["id"] and slot > index:
            link["target_slot" if isinstance(link, dict) else LINK.index("target_slot")] = slot - 1
    for output in (output for other in _items(graph.get("nodes")) for output in _items(other.get("outputs"))):
        if number in _list(output.get("links")):
            output["links"] = [link for link in output["links"] if link != number] or None
    for border in _items(graph.get("inputs")):  # of a subgraph
        if number in _list(border.get("linkIds")):
            border["linkIds"].remove(number)


def _connect(graph: Json, config: Json, node: Json) -> None:
    """Links the config's output to the node's last socket, in the form that this graph's links have; does nothing where
    the graph has no list of links, or the config no output."""
    if graph.get("links") is None:
        graph["links"] = []
    links, outputs = graph["links"], _items(config.get("outputs"))
    if not isinstance(links, list) or not outputs or "id" not in config:
        return
    state = _under(graph, "state")
    by_name = isinstance(state, dict) or any(isinstance(link, dict) for link in links)
    number = 1 + max([0, *(_number(_of_link(link, "id")) for link in links)])
    where = {
        "origin_id": config["id"],
        "origin_slot": 0,
        "target_id": node["id"],
        "target_slot": len(node["inputs"]) - 1,
    }
    kind = SOCKET["type"]
    links.append({"id": number, **where, "type": kind} if by_name else [number, *where.values(), kind])
    if isinstance(state, dict):
        state["lastLinkId"] = max(number, _number(state.get("lastLinkId")))
    elif "last_link_id" in graph:
        graph["last_link_id"] = max(number, _number(graph["last_link_id"]))
    node["inputs"][-1]["link"] = number
    outputs[0]["links"] = [*_list(outputs[0].get("links")), number]


def _of_link(link: Any, name: str) -> Any:
    """Returns this of LINK, of a link in either form; None where there is none, as in the gaps of a list."""
    return dict(zip(LINK, link, strict=False)).get(name) if isinstance(link, list) else _under(link, name)


def _number(value: Any) -> int:
    """Returns a number of the JSON, which may have it as text."""
    if isinstance(value, str):
        return int(value) if value.isdecimal() else 0
    return value if isinstance(value, int) else 0


def _swap_on_canvas(node: Json, after: str, place: str) -> SwappedNode:
    before, node["type"] = node["type"], after
    properties = node.get("properties")
    if isinstance(properties, dict):
        for name in ORIGIN:
            properties.pop(name, None)
        properties[NAME] = after
    return SwappedNode(node=str(node.get("id", node.get("index", "?"))), before=before, after=after, place=place)


def _swap_call(name: str, call: Json, names: dict[str, str], config: str | None) -> SwappedNode:
    before, after = call["class_type"], names[call["class_type"]]
    call["class_type"] = after
    inputs = call["inputs"] if isinstance(call.get("inputs"), dict) else {}
    inputs.pop(SOCKET["name"], None)
    if config is not None:
        call["inputs"] = {**inputs, SOCKET["name"]: [config, 0]}
    if isinstance(meta := call.get("_meta"), dict) and meta.get("title") == before:  # else the user chose it
        meta["title"] = after
    return SwappedNode(node=name, before=before, after=after)
