"""Reports what a machine can do, as Markdown and JSON to paste into an issue, and what a workflow consists of.
Downloads nothing."""

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..accelerators import version_of
from ..errors import Refused
from ..specs import ComfySetup
from ..worker.comfy_loop import import_comfyui
from . import ROOT, find_comfyui, log_to, report_measuring

log = logging.getLogger(__name__)

Json = dict[str, Any]
ClassOf = Callable[[str], str]  # the class of the network in the file of this name, "" where there is none
NO_COMFYUI = {"what": "not run", "note": "no ComfyUI here; --comfyui names its folder"}
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
CONTAINS = (
    "It contains the nodes, their links, numbers and choices, versions, and the classes of networks: no texts, no "
    "titles, no notes, no names of files."
)


def main(options: argparse.Namespace) -> int:
    log_to(sys.stdout)
    try:
        comfyui = find_comfyui(options.comfyui)
        if options.compare:
            flags = ["--cpu"] * (options.devices == "cpu") + options.arguments
            return report_measuring.compare(_read(options.compare), comfyui, flags)
        return _summarise_workflow(options, comfyui) if options.workflow else _measure(options, comfyui)
    except KeyboardInterrupt:
        log.info("stopped")
        return 1
    except Refused as refused:
        log.info("%s", refused)
        return 1


def _summarise_workflow(options: argparse.Namespace, comfyui: str) -> int:
    out, hardware = options.out, machine(comfyui)
    workflow = summary(_read(options.workflow), _classes(comfyui))
    versions = {name: hardware[name] for name in ("python", "torch", "cuda", "devices", "comfyui")}
    versions |= {name: version_of(name) for name in ("comfyui-frontend-package", "comfyui-workflow-templates")}
    path = (out / "workflow" if out.is_dir() else out).with_suffix(".workflow.json")
    try:
        path.write_text(json.dumps({"versions": versions, "workflow": workflow}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise Refused("report.unwritten", error=str(error)) from None
    log.info("written: %s. %s", path, CONTAINS)
    return 0


def _measure(options: argparse.Namespace, comfyui: str) -> int:
    gpus = torch.cuda.device_count() if options.devices == "cuda" else 0
    if options.devices == "cuda" and not gpus:
        log.info("torch sees no CUDA device here; --devices cpu tries the report itself, with a tiny network")
        return 1
    placements = report_measuring.placements(options.world, gpus)
    page = report_measuring.Page(options.out, machine(comfyui))
    page.section("FLUX with random weights on the workers")
    try:
        for row in report_measuring.measurements(comfyui, placements) if comfyui else [NO_COMFYUI]:
            page.add(row)
            log.info("%s", report_measuring.in_a_line(row))
    except KeyboardInterrupt:
        log.info("stopped; results so far are in %s.md and .jsonl", page.out)
        return 1
    log.info("written: %s.md and .jsonl", page.out)
    return 0


def machine(comfyui: str = "") -> dict[str, Any]:
    """Returns the versions, ComfyUI's in this folder too, and the hardware that results depend on."""
    cuda = torch.cuda.is_available()
    return {
        "context-parallel-sampler": _value_in(ROOT / "pyproject.toml", "version", "="),
        "comfyui": _value_in(Path(comfyui) / "comfyui_version.py", "__version__", "=") if comfyui else None,
        "cpu": f"{_value_in(Path('/proc/cpuinfo'), 'model name', ':') or platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": version_of("diffusers"),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "topology": _output("nvidia-smi", "topo", "-m"),
    }


def _value_in(path: Path, name: str, between: str) -> str | None:
    """Returns the first value of `name` in a file of lines such as `name = value`, without quotes."""
    for line in path.read_text().splitlines() if path.is_file() else []:
        key, _, value = line.partition(between)
        if key.strip() == name:
            return value.strip(' "')
    return None


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused("report.unreadable", file=str(file), error=str(error)) from None


def summary(workflow: Any, class_of: ClassOf) -> Json:
    """Returns the workflow, of either form, without what is private, for a bug report: its nodes, links, numbers,
    choices and versions, and the classes of its networks. Raises Refused for anything that is no workflow."""
    if isinstance(workflow, dict) and isinstance(workflow.get("nodes"), list):
        return _graph(workflow, class_of)
    calls = workflow.get("prompt", workflow) if isinstance(workflow, dict) else {}
    calls = calls if isinstance(calls, dict) else {}
    named = (isinstance(call, dict) and isinstance(call.get("class_type"), str) for call in calls.values())
    if not calls or not all(named):
        raise Refused("report.no_workflow", kind=type(workflow).__name__)
    inputs = {name: _value("", call.get("inputs") or {}, class_of) for name, call in calls.items()}
    return {name: {"class_type": call["class_type"], "inputs": inputs[name]} for name, call in calls.items()}


def _graph(graph: Mapping[str, Any], class_of: ClassOf) -> Json:
    kept = _only(graph, ("version", "last_node_id", "last_link_id", "state")) | {"links": graph.get("links") or []}
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


def _node(node: Mapping[str, Any], class_of: ClassOf) -> Json:
    kept = _only(node, ("id", "type", "mode"))
    kept |= {"pos": [0, 0], "size": [200, 100], "flags": {}, "order": node.get("order", 0)}
    versions = _only(node.get("properties") or {}, ("cnr_id", "ver"))
    kept["properties"] = {key: version for key, version in versions.items() if isinstance(version, str)}
    values, names = node.get("widgets_values"), list[str]()
    for side in ("inputs", "outputs"):
        kept[side] = []
        for socket in node.get(side) or []:
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


def _classes(comfyui: str) -> ClassOf:
    """Returns what names the class of a network in a file, by ComfyUI's own detection."""
    if not comfyui:
        return lambda _: ""
    import_comfyui(ComfySetup(root=comfyui, folder=os.getcwd()), torch.device("cpu"))
    import comfy.model_detection
    import comfy.utils

    files = {path.name: path for path in Path(comfyui, "models").rglob("*") if path.is_file()}

    def class_of(name: str) -> str:
        path = files.get(os.path.basename(name.replace("\\", "/")))
        if path is None or path.suffix not in (".safetensors", ".sft"):
            return ""
        state, metadata = comfy.utils.load_torch_file(str(path), return_metadata=True)
        for prefix in (comfy.model_detection.unet_prefix_from_state_dict(state), ""):
            config = comfy.model_detection.model_config_from_unet(state, prefix, metadata=metadata)
            if config is not None:
                return type(config).__name__
        return ""

    return class_of
