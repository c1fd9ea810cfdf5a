"""Swaps native samplers for the CP nodes in a saved workflow, of the canvas' form or the API's. Knows JSON, no ComfyUI.

A CP node has its native node's sockets and widgets in the same order, so that nothing is moved and no value changes.
"""

from __future__ import annotations

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

STANDS_IN = {
    "KSampler": "CPSampler",
    "KSamplerAdvanced": "CPSamplerAdvanced",
    "SamplerCustomAdvanced": "CPSamplerCustom",
    "SamplerCustom": "CPSamplerCustomBasic",
}
SOCKET = {"name": "cp_config", "type": "CP_CONFIG", "shape": 7, "link": None}  # 7: drawn as optional
NAME = "Node name for S&R"
ORIGIN = ("cnr_id", "aux_id", "ver")  # which pack a node is of, and which version of it

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Change:
    """`place` is the subgraph or group node that holds the node, "" for the workflow itself."""

    node: str
    before: str
    after: str
    place: str = ""

    def __str__(self) -> str:
        where = f" in {self.place}" if self.place else ""
        return f"node {self.node}{where}: {self.before} -> {self.after}"


def migrated(workflow: Any) -> tuple[Json, list[Change]]:
    """A copy of `workflow` with CP nodes, and what was changed. Raises ValueError for what is no workflow."""
    workflow = copy.deepcopy(workflow)
    if not isinstance(workflow, dict):
        raise ValueError(f"a workflow is a JSON object, and this is a {type(workflow).__name__}")
    if isinstance(workflow.get("nodes"), list):
        return workflow, [_swap_on_canvas(node, place) for place, node in _on_canvas(workflow) if _native(node, "type")]
    calls = workflow.get("prompt") if isinstance(workflow.get("prompt"), dict) else workflow
    if not calls or not all(isinstance(call, dict) and "class_type" in call for call in calls.values()):
        raise ValueError("neither a workflow as ComfyUI saves it (nodes) nor one exported for its API (class_type)")
    return workflow, [_swap_call(name, call) for name, call in calls.items() if _native(call, "class_type")]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m parallel_runtime migrate", description=__doc__)
    parser.add_argument("workflow", type=Path, help="a saved workflow, or - for standard input")
    parser.add_argument("-o", "--out", type=Path, help="where to write; otherwise NAME.cp.json, - for standard output")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    from_stdin = str(options.workflow) == "-"
    try:
        text = sys.stdin.read() if from_stdin else options.workflow.read_text(encoding="utf-8")
        result, changes = migrated(json.loads(text))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        log.error("%s is no JSON (%s); give it a workflow that ComfyUI saved", options.workflow, error)
        return 1
    except (OSError, ValueError) as error:
        log.error("%s: %s", options.workflow, getattr(error, "strerror", None) or error)
        return 1
    for change in changes:
        log.info("%s", change)
    if not changes:
        log.info("nothing to swap: no %s in it", ", ".join(STANDS_IN))
    out = options.out or (Path("-") if from_stdin else options.workflow.with_suffix(".cp.json"))
    _write(out, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    return 0


def _write(out: Path, text: str) -> None:
    if str(out) == "-":
        sys.stdout.write(text)
    else:
        how = "writes over" if out.exists() else "written to"
        out.write_text(text, encoding="utf-8")
        log.info("%s %s", how, out)


def _native(node: Any, key: str) -> bool:
    return isinstance(node, dict) and isinstance(node.get(key), str) and node[key] in STANDS_IN


def _on_canvas(workflow: Json) -> Iterator[tuple[str, Any]]:
    """Every node with the name of the place that holds it: the canvas, a subgraph, an old group node."""
    yield from (("", node) for node in workflow["nodes"])
    for subgraph in _items(_under(workflow, "definitions", "subgraphs")):
        yield from ((f"subgraph {subgraph.get('name', '')!r}", node) for node in _items(subgraph.get("nodes")))
    groups = _under(workflow, "extra", "groupNodes")
    for name, group in groups.items() if isinstance(groups, dict) else ():
        yield from ((f"group node {name!r}", node) for node in _items(_under(group, "nodes")))


def _under(found: Any, *keys: str) -> Any:
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _items(found: Any) -> list[Json]:
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def _swap_on_canvas(node: Json, place: str) -> Change:
    before, after = node["type"], STANDS_IN[node["type"]]
    node["type"] = after
    properties = node.get("properties")
    if isinstance(properties, dict):
        for name in ORIGIN:
            properties.pop(name, None)
        properties[NAME] = after
    node.setdefault("inputs", []).append(dict(SOCKET))
    return Change(node=str(node.get("id", node.get("index", "?"))), before=before, after=after, place=place)


def _swap_call(name: str, call: Json) -> Change:
    before, after = call["class_type"], STANDS_IN[call["class_type"]]
    call["class_type"] = after
    return Change(node=name, before=before, after=after)
