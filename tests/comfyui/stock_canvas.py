"""A workflow as ComfyUI's page saves it, its subgraphs put where they are used: which node feeds which."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
Place = tuple[int, ...]  # the subgraph nodes on the way to a node, outermost first, and the node itself
INPUTS, OUTPUTS = -10, -20  # a subgraph's own sockets, as its links name them
MUTED, BYPASSED = 2, 4


@dataclass
class Canvas:
    """`nodes` by place; `links` of each graph, by the place of what holds it: (origin, slot) by link, and by a
    subgraph's output."""

    nodes: dict[Place, Json] = field(default_factory=dict)
    _subgraphs: dict[str, Json] = field(default_factory=dict)
    _links: dict[Place, dict[int, tuple[int, int]]] = field(default_factory=dict)
    _outputs: dict[Place, dict[int, tuple[int, int]]] = field(default_factory=dict)

    @classmethod
    def of(cls, workflow: Json) -> Canvas:
        canvas = cls()
        definitions = (workflow.get("definitions") or {}).get("subgraphs") or []
        canvas._subgraphs = {subgraph["id"]: subgraph for subgraph in definitions}
        canvas._add((), workflow)
        return canvas

    def _add(self, holder: Place, graph: Json) -> None:
        links = [_link(link) for link in graph.get("links") or []]
        self._links[holder] = {number: origin for number, origin, _ in links}
        self._outputs[holder] = {slot: origin for _, origin, (target, slot) in links if target == OUTPUTS}
        for node in graph["nodes"]:
            place = (*holder, node["id"])
            self.nodes[place] = node
            if node["type"] in self._subgraphs:
                self._add(place, self._subgraphs[node["type"]])

    def of_type(self, kinds: set[str]) -> Iterator[Place]:
        return (place for place, node in self.nodes.items() if node["type"] in kinds)

    def feeding(self, place: Place, *names: str) -> Iterator[Place]:
        """The nodes at the inputs of these names."""
        for socket in self.nodes[place].get("inputs") or []:
            if socket.get("name") in names and socket.get("link") is not None:
                yield from self._origin(place[:-1], self._links[place[:-1]].get(socket["link"]))

    def upstream(self, places: Iterator[Place], kind: str) -> list[Place]:
        """These nodes, and all that they are fed by along links of this type."""
        seen: dict[Place, None] = {}
        waiting = list(places)
        while waiting:
            place = waiting.pop()
            if place not in seen:
                seen[place] = None
                named = [socket["name"] for socket in self.nodes[place].get("inputs") or [] if _carries(socket, kind)]
                waiting += self.feeding(place, *named)
        return list(seen)

    def _origin(self, holder: Place, link: tuple[int, int] | None) -> Iterator[Place]:
        """The node behind subgraphs' sockets."""
        if link is None:
            return
        node, slot = link
        if node == INPUTS:
            socket = self._subgraphs[self.nodes[holder]["type"]]["inputs"][slot]["name"]
            yield from self.feeding(holder, socket)
        elif (*holder, node) in self._links:
            yield from self._origin((*holder, node), self._outputs[(*holder, node)].get(slot))
        elif (*holder, node) in self.nodes:
            yield (*holder, node)


def _carries(socket: Json, kind: str) -> bool:
    """A switch takes any type, and is on the way only where it gives this one."""
    return socket.get("type") in (kind, "*", "COMFY_MATCHTYPE_V3")


def _link(link: Any) -> tuple[int, tuple[int, int], tuple[int, int]]:
    """(number, (origin, slot), (target, slot)): a canvas has lists, a subgraph objects."""
    if isinstance(link, dict):
        return link["id"], (link["origin_id"], link["origin_slot"]), (link["target_id"], link["target_slot"])
    number, origin, out, target, into, *_ = link
    return number, (origin, out), (target, into)
