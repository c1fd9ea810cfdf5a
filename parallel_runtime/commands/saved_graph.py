"""The graphs of nodes and links in a saved workflow, of any form and with odd parts: reads and changes their links.
Knows no class of node."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SUBGRAPH_INPUT = -10  # in place of a node's id
LINK = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")  # in a link that is a list
GAP = 70  # pixels: a title and a row of badges

Json = dict[str, Any]


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
