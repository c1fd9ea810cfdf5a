"""Replaces native samplers by CP nodes in a saved workflow or an API prompt; with --back, CP nodes by native samplers.
Needs no ComfyUI.

A CP node has its native node's sockets and widgets, so no value changes. If a graph has one CP Parallel Config, its new
CP nodes are connected to it, as ComfyUI's page does it. A text encoder of more than 4 GB gets a CP CLIP, which --back
takes away. --back leaves the CP Parallel Config in the graph, unconnected, and this pack's other nodes, and names them.
"""

import argparse
import copy
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import log_to
from . import saved_graph as saved

log = logging.getLogger(__name__)

Json = saved.Json
REPLACEMENTS = {
    "KSampler": "CPSampler",
    "KSamplerAdvanced": "CPSamplerAdvanced",
    "SamplerCustomAdvanced": "CPSamplerCustom",
    "SamplerCustom": "CPSamplerCustomBasic",
}
NATIVE = {ours: native for native, ours in REPLACEMENTS.items()}
CONFIG = "CPParallelConfig"
OTHERS = (
    CONFIG, "CPPlan", "CPCompare", "CPLoadDiffusionModel", "CPLoadCLIP", "CPModel", "CPVAE", "CPCLIP",
    "CPDemoModel", "CPDemoConditioning", "CPDemoDecode",
)  # fmt: skip
CLIP = "CPCLIP"
LOADED_THERE = "CPLoadCLIP"  # has its text encoder in the workers already
LARGE_ENCODER_BYTES = 4e9
ENCODER_FOLDERS = ("text_encoders", "clip")  # in ComfyUI's folder of models
CLIP_SIZE = (230, 46)
ALWAYS = 0  # the mode of a node that is neither muted nor bypassed
SOCKET: Json = {"name": "cp_config", "type": "CP_CONFIG", "shape": 7, "link": None}  # 7: drawn as optional
NAME = "Node name for S&R"
ORIGIN = ("cnr_id", "aux_id", "ver")  # which pack a node is of, and which version of it

IsLarge = Callable[[list[str]], bool]  # of the texts of a loader, file names among them


@dataclass(frozen=True, kw_only=True)
class SwappedNode:
    """`place` is the subgraph or group node that holds the node, "" for the workflow itself; `before` or `after` is ""
    for a node that is new, or gone."""

    node: str
    before: str
    after: str
    place: str = ""

    def __str__(self) -> str:
        where = f" in {self.place}" if self.place else ""
        what = f"{self.before} -> {self.after}" if self.before else f"{self.after} added"
        return f"node {self.node}{where}: {what if self.after else f'{self.before} taken away'}"


def migrated(workflow: Any, *, back: bool = False, large: IsLarge = lambda _: False) -> tuple[Json, list[SwappedNode]]:
    """Returns a copy of `workflow` with CP nodes, or `back` with native ones, and what was changed; a text encoder that
    is `large` gets a CP CLIP. Raises Refused, a ValueError, for what is no workflow."""
    workflow, names = copy.deepcopy(workflow), NATIVE if back else REPLACEMENTS
    if isinstance(workflow, dict) and isinstance(workflow.get("nodes"), list):
        graphs = [*saved.graphs_of(workflow)]
        return workflow, [change for place, graph in graphs for change in _swap_nodes(graph, place, names, large)]
    return workflow, [*_swap_calls(saved.calls_of(workflow), names, large)]


def remaining(workflow: Json) -> list[str]:
    """Returns the nodes of this pack in a workflow that has no CP sampler any more, each with its number."""
    found = []
    if isinstance(workflow.get("nodes"), list):
        for place, graph in saved.graphs_of(workflow):
            where = f" in {place}" if place else ""
            found += [(_number(node), where, node.get("type")) for node in saved.items(graph.get("nodes"))]
    else:
        found += [(name, "", call["class_type"]) for name, call in saved.calls_of(workflow).items()]
    return [f"node {number}{where} ({kind})" for number, where, kind in found if kind in OTHERS]


def main(options: argparse.Namespace) -> int:
    log_to(sys.stderr)
    back, from_stdin = options.back, str(options.workflow) == "-"
    try:
        text = sys.stdin.read() if from_stdin else options.workflow.read_text(encoding="utf-8")
        result, changes = migrated(
            json.loads(text), back=back, large=lambda names: options.clip or _is_large(names, options.models)
        )
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        log.error("%s is not JSON (%s); give it a workflow that ComfyUI saved", options.workflow, error)
        return 1
    except (OSError, ValueError) as error:
        log.error("%s: %s", options.workflow, getattr(error, "strerror", None) or error)
        return 1
    name = options.workflow.stem.removesuffix(".cp").removesuffix(".native")
    beside = options.workflow.with_name(f"{name}.{'native' if back else 'cp'}.json")
    out = options.out or (Path("-") if from_stdin else beside)
    _log_changes(result, changes, back)
    if not changes:
        kinds = ", ".join(NATIVE if back else REPLACEMENTS)
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


def _log_changes(result: Json, changes: list[SwappedNode], back: bool) -> None:
    for change in changes:
        log.info("%s", change)
    if back and any(change.before != CLIP for change in changes):
        log.info("a file does not say which samplers were ComfyUI's own before: now all of them are")
    if back and (left := remaining(result)):
        log.info("this pack's nodes that are left: %s; take them out, or keep the pack", ", ".join(left))


def _write(out: Path, text: str) -> None:
    if str(out) == "-":
        sys.stdout.write(text)
    else:
        how = "writes over" if out.exists() else "written to"
        out.write_text(text, encoding="utf-8")
        log.info("%s %s", how, out)


def _is_large(names: list[str], models: Path) -> bool:
    """Have the text encoders among these files more bytes than ComfyUI should load beside a network?"""
    total = 0
    for name in names:
        places = [os.path.join(models, folder, name) for folder in ENCODER_FOLDERS]
        total += next((os.path.getsize(place) for place in places if os.path.isfile(place)), 0)
    return total > LARGE_ENCODER_BYTES


def _number(node: Json) -> str:
    return str(node.get("id", node.get("index", "?")))


def _swap_nodes(graph: Json, place: str, names: dict[str, str], large: IsLarge) -> Iterator[SwappedNode]:
    nodes = saved.items(graph.get("nodes"))
    configs = [node for node in nodes if node.get("type") == CONFIG and node.get("mode", ALWAYS) == ALWAYS]
    config = configs[0] if len(configs) == 1 else None
    samplers = [node for node in nodes if isinstance(node.get("type"), str) and node["type"] in names]
    for node in samplers:
        before, after = node["type"], names[node["type"]]
        node["type"] = after
        if isinstance(properties := node.get("properties"), dict):
            for origin in ORIGIN:
                properties.pop(origin, None)
            properties[NAME] = after
        if names is NATIVE:
            saved.disconnect(graph, node, SOCKET["name"])
        else:
            node["inputs"] = [*saved.as_list(node.get("inputs")), dict(SOCKET)]
            saved.connect(graph, config, 0, node, len(node["inputs"]) - 1)
        yield SwappedNode(node=_number(node), before=before, after=after, place=place)
    yield from _take_clips(graph, place) if names is NATIVE else _put_clips(graph, place, samplers, config, large)


def _put_clips(
    graph: Json, place: str, samplers: list[Json], config: Json | None, large: IsLarge
) -> Iterator[SwappedNode]:
    """Puts a CP CLIP between an output of a loader and all that it goes to, where the text encoder is large."""
    by_id = {node["id"]: node for node in saved.items(graph.get("nodes")) if isinstance(node.get("id"), int | str)}
    kinds = {number: node.get("type") for number, node in by_id.items()}
    below = [number for number, node in by_id.items() if any(node is sampler for sampler in samplers)]
    for loader_id, slot in _loaders(saved.wires_of(graph), kinds, below):
        loader, nodes = by_id[loader_id], saved.items(graph["nodes"])
        values = loader.get("widgets_values")
        if not large(_texts(values.values() if isinstance(values, dict) else saved.as_list(values))):
            continue
        state = saved.under(graph, "state")
        last = max([saved.number_of(graph.get("last_node_id")), saved.number_of(saved.under(state, "lastNodeId"))])
        number = 1 + max([last, *(saved.number_of(node.get("id")) for node in nodes)])
        if isinstance(state, dict):
            state["lastNodeId"] = number
        elif "last_node_id" in graph:
            graph["last_node_id"] = number
        fed = saved.move_links(graph, (loader_id, slot), (number, 0))
        made = {
            "id": number, "type": CLIP, "pos": saved.free_place(nodes, loader, CLIP_SIZE), "size": [*CLIP_SIZE],
            "flags": {}, "order": 0, "mode": ALWAYS, "properties": {NAME: CLIP}, "widgets_values": [],
            "inputs": [{"name": "clip", "type": "CLIP", "link": None}, dict(SOCKET)],
            "outputs": [{"name": "CLIP", "type": "CLIP", "links": fed}],
        }  # fmt: skip
        graph["nodes"].append(made)
        outputs = saved.items(loader.get("outputs"))
        if slot < len(outputs):
            outputs[slot]["links"] = None
        saved.connect(graph, loader, slot, made, 0)
        saved.connect(graph, config, 0, made, 1)
        yield SwappedNode(node=str(number), before="", after=CLIP, place=place)


def _take_clips(graph: Json, place: str) -> Iterator[SwappedNode]:
    """Takes each CP CLIP away that gets a CLIP: what it fed gets that."""
    for node in [node for node in saved.items(graph.get("nodes")) if node.get("type") == CLIP]:
        number, origin = node.get("id"), saved.origin_of(graph, node, "clip")
        if origin is not None and isinstance(number, int | str):
            saved.disconnect(graph, node, SOCKET["name"])
            saved.disconnect(graph, node, "clip")
            graph["nodes"].remove(node)
            saved.give_back_links(graph, number, origin)
            yield SwappedNode(node=str(number), before=CLIP, after="", place=place)


def _loaders(wires: list[saved.Wire], kinds: dict[Any, Any], samplers: list[Any]) -> list[tuple[Any, int]]:
    """Returns which outputs above these samplers are of loaders of CLIPs, and go to others than CP CLIP. `kinds` has
    the class of each node."""
    above = dict.fromkeys(samplers)
    fresh = samplers
    while fresh:
        fresh = [wire.origin for wire in wires if wire.target in fresh and wire.origin not in above]
        above |= dict.fromkeys(fresh)
    changed = {wire.target for wire in wires if wire.of_clip}  # nodes that get a CLIP, and may give it on
    outputs = [
        (wire.origin, wire.slot)
        for wire in wires
        if wire.of_clip and wire.origin in above and wire.origin not in changed and kinds.get(wire.target) != CLIP
    ]
    return [output for output in dict.fromkeys(outputs) if kinds.get(output[0], LOADED_THERE) != LOADED_THERE]


def _texts(values: Any) -> list[str]:
    return [value for value in values if isinstance(value, str)]


def _inputs(call: Json) -> Json:
    return call["inputs"] if isinstance(call.get("inputs"), dict) else {}


def _swap_calls(calls: Json, names: dict[str, str], large: IsLarge) -> Iterator[SwappedNode]:
    configs = [name for name, call in calls.items() if call["class_type"] == CONFIG]
    config = [configs[0], 0] if len(configs) == 1 and names is REPLACEMENTS else None
    samplers = {name: call for name, call in calls.items() if call["class_type"] in names}
    for name, call in samplers.items():
        before, after = call["class_type"], names[call["class_type"]]
        call["class_type"] = after
        inputs = _inputs(call)
        inputs.pop(SOCKET["name"], None)
        if config is not None:
            call["inputs"] = {**inputs, SOCKET["name"]: config}
        if isinstance(meta := call.get("_meta"), dict) and meta.get("title") == before:  # else the user chose it
            meta["title"] = after
        yield SwappedNode(node=name, before=before, after=after)
    yield from _take_clip_calls(calls) if names is NATIVE else _put_clip_calls(calls, [*samplers], config, large)


def _put_clip_calls(
    calls: Json, samplers: list[str], config: list[Any] | None, large: IsLarge
) -> Iterator[SwappedNode]:
    wires = []
    for name, call in calls.items():
        for socket, value in _inputs(call).items():
            if isinstance(value, list) and [*map(type, value)] == [str, int]:
                wires.append(saved.Wire(value[0], value[1], name, socket.rstrip("0123456789") == "clip"))
    kinds = {name: call["class_type"] for name, call in calls.items()}
    for loader, slot in _loaders(wires, kinds, samplers):
        if large(_texts(_inputs(calls[loader]).values())):
            made = str(1 + max(map(saved.number_of, calls)))
            _give(calls, [loader, slot], [made, 0])
            inputs = {"clip": [loader, slot]} | ({} if config is None else {SOCKET["name"]: config})
            calls[made] = {"class_type": CLIP, "inputs": inputs, "_meta": {"title": "CP CLIP"}}
            yield SwappedNode(node=made, before="", after=CLIP)


def _take_clip_calls(calls: Json) -> Iterator[SwappedNode]:
    for name in [name for name, call in calls.items() if call["class_type"] == CLIP]:
        if isinstance(origin := _inputs(calls[name]).get("clip"), list):
            del calls[name]
            _give(calls, [name, 0], origin)
            yield SwappedNode(node=name, before=CLIP, after="")


def _give(calls: Json, before: list[Any], after: list[Any]) -> None:
    """Has all inputs that come from one output of a node come from another one."""
    for call in calls.values():
        _inputs(call).update({name: after for name, value in _inputs(call).items() if value == before})
