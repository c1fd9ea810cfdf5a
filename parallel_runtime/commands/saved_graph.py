"""The graphs of nodes and links in a saved workflow, of any form and with odd parts: reads and changes their links, and
leaves out what is private. Knows no class of node."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import Refused
from ..request import widgets

SUBGRAPH_INPUT = -10  # in place of a node's id
LINK = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")  # in a link that is a list
GAP = 70  # pixels: a title and a row of badges

CHOICES = {  # widgets whose values are words of ComfyUI's or ours
    "sampler_name", "scheduler", "type", "weight_dtype", "device", "upscale_method", "crop", "method", "mode",
    "add_noise", "return_with_leftover_noise", "noise_mode", "resize_type", "scale_method", "model_type", "shares",
    *(widget.name for widget in widgets() if widget.options),
}  # fmt: skip
PUNCTUATION, LONGEST = "_.+:-", 40  # of a choice
FILES = {
    ".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin", ".gguf", ".png", ".jpg", ".jpeg", ".webp", ".mp4", ".webm",
    ".wav", ".mp3", ".flac",
}  # fmt: skip
AFTER_A_SEED = ("fixed", "randomize", "increment", "decrement")

Json = dict[str, Any]
ClassOf = Callable[[str], str]  # the class of the network in the file of this name, "" where there is none


@dataclass(frozen=True)
class Wire:
    """A link of type CLIP, or of another one, between two nodes."""

    origin: int | str
    slot: int
    target: int | str
    of_clip: bool


def graphs_of(workflow: Json) -> Iterator[tuple[str, Json]]:
    """Yields every graph of nodes and links, with its name: the canvas, a subgraph, an old group node."""
    yield "", workflow
    for subgraph in items(under(workflow, "definitions", "subgraphs")):
        yield f"subgraph {subgraph.get('name', '')!r}", subgraph
    groups = under(workflow, "extra", "groupNodes")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        if isinstance(group, dict):
            yield f"group node {name!r}", group


def under(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def items(value: Any) -> list[Json]:
    return [item for item in as_list(value) if isinstance(item, dict)]


def wires_of(graph: Json) -> list[Wire]:
    links = [[_of_link(link, name) for name in LINK] for link in as_list(graph.get("links"))]
    return [
        Wire(origin, slot, target, kind == "CLIP")
        for _, origin, slot, target, _, kind in links
        if isinstance(origin, int | str) and isinstance(target, int | str) and isinstance(slot, int)
    ]


def connect(graph: Json, origin: Json | None, slot: int, node: Json, socket: int) -> None:
    """Links an output of `origin` to a socket of the node, in the form that this graph's links have; does nothing where
    the graph has no list of links, there is no such output, or the node, of an old group, has no id."""
    if origin is None or "id" not in node:
        return
    if graph.get("links") is None:
        graph["links"] = []
    links, outputs = graph["links"], items(origin.get("outputs"))
    if not isinstance(links, list) or slot >= len(outputs) or "id" not in origin:
        return
    state = under(graph, "state")
    by_name = isinstance(state, dict) or any(isinstance(link, dict) for link in links)
    number = 1 + max([0, *(number_of(_of_link(link, "id")) for link in links)])
    where = {"origin_id": origin["id"], "origin_slot": slot, "target_id": node["id"], "target_slot": socket}
    kind = node["inputs"][socket]["type"]
    links.append({"id": number, **where, "type": kind} if by_name else [number, *where.values(), kind])
    if isinstance(state, dict):
        state["lastLinkId"] = max(number, number_of(state.get("lastLinkId")))
    elif "last_link_id" in graph:
        graph["last_link_id"] = max(number, number_of(graph["last_link_id"]))
    node["inputs"][socket]["link"] = number
    outputs[slot]["links"] = [*as_list(outputs[slot].get("links")), number]


def origin_of(graph: Json, node: Json, name: str) -> tuple[Any, int] | None:
    """Returns the output that is linked to this socket of `node`."""
    number = next((socket.get("link") for socket in items(node.get("inputs")) if socket.get("name") == name), None)
    for link in as_list(graph.get("links")):
        slot = _of_link(link, "origin_slot")
        if number_of(number) and number_of(_of_link(link, "id")) == number_of(number) and isinstance(slot, int):
            return _of_link(link, "origin_id"), slot
    return None


def disconnect(graph: Json, node: Json, name: str) -> None:
    """Removes this socket of `node` with its link; links to later sockets get their new numbers."""
    sockets = as_list(node.get("inputs"))
    index = next((index for index, socket in enumerate(sockets) if under(socket, "name") == name), None)
    if index is None:
        return
    number = number_of(sockets.pop(index).get("link"))
    links = graph.get("links")
    if not isinstance(links, list):
        return
    graph["links"] = links = [link for link in links if not number or number_of(_of_link(link, "id")) != number]
    for link in links:
        slot = number_of(_of_link(link, "target_slot"))
        if "id" in node and _of_link(link, "target_id") == node["id"] and slot > index:
            link["target_slot" if isinstance(link, dict) else LINK.index("target_slot")] = slot - 1
    for output in (output for other in items(graph.get("nodes")) for output in items(other.get("outputs"))):
        if number in as_list(output.get("links")):
            output["links"] = [link for link in output["links"] if link != number] or None
    for border in items(graph.get("inputs")):  # of a subgraph
        if number in as_list(border.get("linkIds")):
            border["linkIds"].remove(number)


def move_links(graph: Json, before: tuple[Any, int], after: tuple[Any, int]) -> list[int]:
    """Has all links that come from an output of a node come from another one; returns their numbers."""
    names = ("origin_id", "origin_slot")
    moved = [link for link in as_list(graph.get("links")) if tuple(_of_link(link, name) for name in names) == before]
    for link in moved:
        for name, value in zip(names, after, strict=True):
            link[name if isinstance(link, dict) else LINK.index(name)] = value
    return [number_of(_of_link(link, "id")) for link in moved]


def give_back_links(graph: Json, node: int | str, origin: tuple[Any, int]) -> None:
    """Gives what came from a node's first output to `origin`, another node's output or an input of the subgraph."""
    fed, (number, slot) = move_links(graph, (node, 0), origin), origin
    givers = [other for other in items(graph.get("nodes")) if other.get("id") == number]
    outputs, borders = [items(other.get("outputs")) for other in givers], items(graph.get("inputs"))
    slots = [(outs, "links") for outs in outputs] + [(borders, "linkIds")] * (number == SUBGRAPH_INPUT)
    for of_node, name in slots:
        if slot < len(of_node):
            of_node[slot][name] = [*as_list(of_node[slot].get(name)), *fed]


def _of_link(link: Any, name: str) -> Any:
    """Returns this of LINK, of a link in either form; None where there is none, as in the gaps of a list."""
    return dict(zip(LINK, link, strict=False)).get(name) if isinstance(link, list) else under(link, name)


def number_of(value: Any) -> int:
    """Returns a number of the JSON, which may have it as text."""
    if isinstance(value, str):
        return int(value) if value.isdecimal() else 0
    return value if isinstance(value, int) else 0


def free_place(nodes: list[Json], above: Json, size: tuple[int, int]) -> list[float]:
    """Returns the first place below a node where one of this size covers no other."""
    boxes = [(*_pair(node.get("pos")), *_pair(node.get("size"))) for node in nodes]
    x, top = _pair(above.get("pos"))
    y = top + _pair(above.get("size"))[1] + GAP
    width, height = size
    while covered := [
        other_y + other_height + GAP
        for other_x, other_y, other_width, other_height in boxes
        if other_x < x + width and x < other_x + other_width
        if other_y < y + height + GAP and y < other_y + other_height + GAP
    ]:
        y = max(covered)
    return [x, y]


def _pair(value: Any) -> tuple[float, float]:
    parts = [*value.values()] if isinstance(value, dict) else as_list(value)
    return (parts[0], parts[1]) if len(parts) > 1 and all(isinstance(one, int | float) for one in parts[:2]) else (0, 0)


def summary(workflow: Any, class_of: ClassOf) -> Json:
    """Returns the workflow, of either form, without what is private, for a bug report: its nodes, links, numbers,
    choices and versions, and the classes of its networks. Raises Refused for anything that is no workflow."""
    if isinstance(workflow, dict) and isinstance(workflow.get("nodes"), list):
        return _graph(workflow, class_of)
    kept = {}
    for name, call in calls_of(workflow).items():
        inputs = _value("", call.get("inputs") or {}, class_of)
        kept[name] = {"class_type": call["class_type"], "inputs": inputs}
    return kept


def calls_of(workflow: Any) -> Json:
    """Returns the nodes of a workflow that was exported for the API, or of a request to /prompt. Raises Refused."""
    calls: Any = workflow.get("prompt", workflow) if isinstance(workflow, dict) else None
    if isinstance(calls, dict) and isinstance(calls.get("nodes"), list):
        raise Refused("report.not_exported")
    values = [*calls.values()] if isinstance(calls, dict) else []
    if not values or not all(isinstance(call, dict) and isinstance(call.get("class_type"), str) for call in values):
        raise Refused("report.no_workflow", kind=type(workflow).__name__)
    return calls


def _graph(graph: Mapping[str, Any], class_of: ClassOf) -> Json:
    kept = _only(graph, ("version", "last_node_id", "last_link_id", "state")) | {"links": graph.get("links") or []}
    kept["nodes"] = [_node(node, class_of) for node in items(graph.get("nodes"))]
    for side in ("inputNode", "outputNode"):
        if isinstance(graph.get(side), dict):
            kept[side] = _only(graph[side], ("id", "bounding"))
    if "inputs" in graph:  # a subgraph, whose sockets its links name by their place
        kept |= _only(graph, ("id",)) | {"name": "subgraph"}
        for side in ("inputs", "outputs"):
            kept[side] = [_only(socket, ("id", "name", "type", "linkIds")) for socket in items(graph.get(side))]
    if inner := items(under(graph, "definitions", "subgraphs")):
        kept["definitions"] = {"subgraphs": [_graph(subgraph, class_of) for subgraph in inner]}
    return kept


def _only(source: Mapping[str, Any], keys: Iterable[str]) -> Json:
    return {key: source[key] for key in keys if key in source}


def _node(node: Mapping[str, Any], class_of: ClassOf) -> Json:
    kept = _only(node, ("id", "type", "mode"))
    kept |= {"pos": [0, 0], "size": [200, 100], "flags": {}, "order": node.get("order", 0)}
    versions = _only(node.get("properties") or {}, ("cnr_id", "ver"))
    kept["properties"] = {key: version for key, version in versions.items() if isinstance(version, str)}
    values, names = node.get("widgets_values"), list[str]()
    for side in ("inputs", "outputs"):
        kept[side] = []
        for socket in items(node.get(side)):
            kept[side].append(_only(socket, ("name", "type", "link", "links", "shape")))
            if not isinstance(socket.get("widget"), dict):
                continue
            name = socket["widget"].get("name")
            kept[side][-1]["widget"] = {"name": name}
            if side == "inputs":
                names.append(str(name))
                # The mode that the page adds behind a seed has no socket.
                behind = values[len(names)] if isinstance(values, list) and len(names) < len(values) else None
                if name in ("seed", "noise_seed") and behind in AFTER_A_SEED:
                    names.append("mode")
    if isinstance(values, dict):
        kept["widgets_values"] = _value("", values, class_of)
    elif isinstance(values, list):
        names += [""] * len(values)
        kept["widgets_values"] = [_value(name, value, class_of) for name, value in zip(names, values, strict=False)]
    return kept


def _value(name: str, value: Any, class_of: ClassOf) -> Any:
    """Returns a number, a choice or a link unchanged, of a file the class of its network, of a text its length."""
    if isinstance(value, list):
        is_link = len(value) == 2 and isinstance(value[1], int) and not isinstance(value[0], list)
        return value if is_link else [_value(name, one, class_of) for one in value]
    if isinstance(value, dict):
        return {key: _value(key, one, class_of) for key, one in value.items()}
    if not isinstance(value, str):
        return value
    ending = os.path.splitext(value)[1].lower()
    if ending in FILES:
        return f"{class_of(value) or 'file'}{ending}"
    is_word = len(value) <= LONGEST and all(letter.isalnum() or letter in PUNCTUATION for letter in value)
    if not value or (is_word and name.rpartition(".")[2] in CHOICES):
        return value
    return f"text of {len(value)} characters"
