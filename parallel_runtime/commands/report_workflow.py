"""A workflow without what is private, for a bug report: its nodes, links, numbers, choices and versions, and
the classes of its networks. Texts, titles, notes and names of files are left out.
"""

import json
import logging
import os
import runpy
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..accelerators import version_of
from ..errors import Refused
from ..specs import ComfySetup
from ..worker.comfy_loop import import_comfyui

log = logging.getLogger(__name__)

Json = dict[str, Any]
CHOICES = {  # widgets whose values are words of ComfyUI's or ours
    "sampler_name", "scheduler", "type", "weight_dtype", "device", "upscale_method", "crop", "method", "mode",
    "add_noise", "return_with_leftover_noise", "noise_mode", "resize_type", "scale_method", "dtype", "compile",
    "rotate_method", "attention_backend", "weights", "cuda_graphs", "shares", "after_sampling", "model_type",
}  # fmt: skip
PUNCTUATION, LONGEST = "_.+:-", 40  # of a choice
FILES = {
    ".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin", ".gguf", ".png", ".jpg", ".jpeg", ".webp", ".mp4", ".webm",
    ".wav", ".mp3", ".flac",
}  # fmt: skip
AFTER_A_SEED = ("fixed", "randomize", "increment", "decrement")
KEPT_OF_A_GRAPH = ("version", "last_node_id", "last_link_id", "state")
KEPT_OF_A_NODE = ("id", "type", "mode")
KEPT_OF_A_SOCKET = ("name", "type", "link", "links", "shape")
VERSIONS = ("cnr_id", "ver")
CONTAINS = (
    "It contains the nodes, their links, numbers and choices, versions, and the classes of networks: no texts, no "
    "titles, no notes, no names of files."
)


def write(file: Path, out: Path, comfyui: str, versions: Json) -> Path:
    """Writes the summary of `file` beside `out`, and returns its path. Raises Refused where it cannot."""
    workflow = summary(read(file), _classes(comfyui))
    packages = {name: version_of(name) for name in ("comfyui-frontend-package", "comfyui-workflow-templates")}
    report = {"versions": versions | {"comfyui": _comfyui_version(comfyui)} | packages, "workflow": workflow}
    path = (out / "workflow" if out.is_dir() else out).with_suffix(".workflow.json")
    try:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise Refused("report.unwritten", error=str(error)) from None
    return path


def summary(workflow: Any, class_of: Callable[[str], str]) -> Json:
    """Returns the workflow, of either form, without what is private. Raises Refused for anything else."""
    if isinstance(workflow, dict) and isinstance(workflow.get("nodes"), list):
        return _graph(workflow, class_of)
    calls = workflow.get("prompt", workflow) if isinstance(workflow, dict) else {}
    calls = calls if isinstance(calls, dict) else {}
    named = (isinstance(call, dict) and isinstance(call.get("class_type"), str) for call in calls.values())
    if not calls or not all(named):
        raise Refused("report.no_workflow", kind=type(workflow).__name__)
    return {
        name: {"class_type": call["class_type"], "inputs": _value("", call.get("inputs") or {}, class_of)}
        for name, call in calls.items()
    }


def read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused("report.unreadable", file=str(file), error=str(error)) from None


def _graph(graph: Mapping[str, Any], class_of: Callable[[str], str]) -> Json:
    kept = _only(graph, KEPT_OF_A_GRAPH) | {"links": graph.get("links") or []}
    kept["nodes"] = [_node(node, class_of) for node in graph["nodes"] if isinstance(node, dict)]
    for side in ("inputNode", "outputNode"):
        if isinstance(graph.get(side), dict):
            kept[side] = _only(graph[side], ("id", "bounding"))
    if "inputs" in graph:  # a subgraph, whose sockets its links name by their place
        kept |= _only(graph, ("id",)) | {"name": "subgraph"}
        for side in ("inputs", "outputs"):
            kept[side] = [_only(socket, ("id", "name", "type", "linkIds")) for socket in graph.get(side) or []]
    if inner := (graph.get("definitions") or {}).get("subgraphs"):
        kept["definitions"] = {"subgraphs": [_graph(subgraph, class_of) for subgraph in inner]}
    return kept


def _only(source: Mapping[str, Any], keys: Iterable[str]) -> Json:
    return {key: source[key] for key in keys if key in source}


def _node(node: Mapping[str, Any], class_of: Callable[[str], str]) -> Json:
    kept = _only(node, KEPT_OF_A_NODE) | {"pos": [0, 0], "size": [200, 100], "flags": {}, "order": node.get("order", 0)}
    versions = _only(node.get("properties") or {}, VERSIONS)
    kept["properties"] = {key: version for key, version in versions.items() if isinstance(version, str)}
    for side in ("inputs", "outputs"):
        kept[side] = [_socket(socket) for socket in node.get(side) or []]
    values = node.get("widgets_values")
    if isinstance(values, dict):
        kept["widgets_values"] = _value("", values, class_of)
    elif isinstance(values, list):
        names = _widget_names(node, values)
        kept["widgets_values"] = [_value(next(names, ""), value, class_of) for value in values]
    return kept


def _socket(socket: Mapping[str, Any]) -> Json:
    kept = _only(socket, KEPT_OF_A_SOCKET)
    if isinstance(socket.get("widget"), dict):
        kept["widget"] = {"name": socket["widget"].get("name")}
    return kept


def _widget_names(node: Mapping[str, Any], values: list[Any]) -> Iterator[str]:
    """Yields the name of the widget of each value; the mode that the page adds behind a seed has no socket."""
    sockets = [socket for socket in node.get("inputs") or [] if isinstance(socket.get("widget"), dict)]
    place = 0
    for socket in sockets:
        yield (name := str(socket["widget"].get("name")))
        place += 1
        if name in ("seed", "noise_seed") and place < len(values) and values[place] in AFTER_A_SEED:
            yield "mode"
            place += 1


def _value(name: str, value: Any, class_of: Callable[[str], str]) -> Any:
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


def _classes(comfyui: str) -> Callable[[str], str]:
    """Returns what names the class of a network in a file, by ComfyUI's own detection; "" where it is no network."""
    if not comfyui:
        return lambda _: ""
    import_comfyui(ComfySetup(root=comfyui, folder=os.getcwd()), torch.device("cpu"))
    files = {path.name: path for path in Path(comfyui, "models").rglob("*") if path.is_file()}

    def class_of(name: str) -> str:
        path = files.get(os.path.basename(name.replace("\\", "/")))
        return _network_class(path) if path else ""

    return class_of


def _network_class(path: Path) -> str:
    import comfy.model_detection
    import comfy.utils

    if path.suffix not in (".safetensors", ".sft"):
        return ""
    state, metadata = comfy.utils.load_torch_file(str(path), return_metadata=True)
    prefix = comfy.model_detection.unet_prefix_from_state_dict(state)
    for start in (prefix, ""):
        config = comfy.model_detection.model_config_from_unet(state, start, metadata=metadata)
        if config is not None:
            return type(config).__name__
    return ""


def _comfyui_version(comfyui: str) -> str | None:
    file = Path(comfyui, "comfyui_version.py")
    return str(runpy.run_path(str(file)).get("__version__")) if comfyui and file.is_file() else None
