"""Reports what a machine can do, as Markdown and JSON to paste into an issue, and what a workflow consists of.

Seconds a step, and how far apart the results are: ComfyUI's FLUX with random weights, sampled by the product's own
workers on 1, 2, 4, ... devices, as CP Plan's Measure does with the user's model. Its blocks have their published width,
but are few, so that a temporary file has room for them. Downloads nothing.

`compare` is CP Compare without the page: a ComfyUI of its own, on a free port, takes one step of each sampler of a
workflow natively and on the workers. A ComfyUI that runs beside it, its queue and its files are not touched."""

import argparse
import json
import logging
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from ..accelerators import version_of
from ..errors import ParallelError, Refused
from ..group.worker_group import WorkerGroup
from ..jobs import EvaluationJob
from ..loading.fingerprint import stat_file
from ..specs import ComfySetup, ModelSpec, Parallelism, Placement
from ..worker.comfy_loop import import_comfyui
from . import ROOT, find_comfyui, log_to
from .saved_graph import ClassOf, calls_of, summary

log = logging.getLogger(__name__)
Measurement = dict[str, Any]  # by the names of COLUMNS, and "failed": why there is no more to tell
NAME, ENDINGS = "report", (".jsonl", ".md")
NODE = "CPCompare"  # the node's class, and its name in the prompt
START_SECONDS = 600.0  # packs may be many
ANSWER_SECONDS = 300.0  # it may be busy
STOP_SECONDS = 20.0
LOG_CHARACTERS = 2000
WARM_UP, STEPS = 4, 5  # the first ones load, and are recorded as CUDA graphs
CONFIG: dict[str, Any] = dict(
    image_model="flux", in_channels=16, out_channels=16, vec_in_dim=768, context_in_dim=4096, hidden_size=3072,
    mlp_ratio=4.0, num_heads=24, depth=2, depth_single_blocks=4, axes_dim=[16, 56, 56], theta=10000, patch_size=2,
    qkv_bias=True, guidance_embed=True, txt_ids_dims=[],
)  # fmt: skip
TINY = CONFIG | dict(vec_in_dim=64, context_in_dim=128, hidden_size=256, num_heads=2, depth_single_blocks=2)
COLUMNS = {  # of all parts, in their order: a value; its title, "" for its name; the value on a line, without titles
    "what": ("{}", "", "{}"),
    "dtype": ("{}", "", "{}"),
    "weights": ("{}", "", "{}"),
    "workers": ("{}", "", "workers: {}"),
    "degrees": ("{}", "", "{}"),
    "mode": ("{}", "", "{}"),
    "error": ("{:.1e}", "", "error {}"),
    "seconds": ("{:.2f} s", "time", "{}"),
    "ms": ("{:.3g} ms", "time", "{}"),
    "host_ms": ("{:.3g} ms", "of the host", "{} of the host"),
    "faster": ("{:.2f} x", "as fast as the first", "{} as fast as the first"),
    "gib": ("{:.2f} GiB", "memory", "{}"),
    "graph_gib": ("{:.2f} GiB", "of a graph", "{} of a graph"),
    "links": ("{:.1f} GB/s", "between workers", "{} between workers"),
    "note": ("{}", "", "{}"),
}


def main(options: argparse.Namespace) -> int:
    log_to(sys.stdout)
    try:
        comfyui = find_comfyui(options.comfyui)
        if options.compare:
            flags = ["--cpu"] * (options.devices == "cpu") + options.arguments
            return compare(_read(options.compare), comfyui, flags)
        return _summarise_workflow(options, comfyui) if options.workflow else _measure(options, comfyui)
    except (KeyboardInterrupt, Refused) as error:
        log.info("%s", str(error) or "stopped")
        return 1


def _summarise_workflow(options: argparse.Namespace, comfyui: str) -> int:
    told = ("context-parallel-sampler", "python", "torch", "cuda", "devices", "comfyui")
    versions = {name: fact for name, fact in machine(comfyui).items() if name in told}
    versions |= {name: version_of(name) for name in ("comfyui-frontend-package", "comfyui-workflow-templates")}
    report = {"versions": versions, "workflow": summary(_read(options.workflow), _classes(comfyui))}
    path = (options.out / "workflow" if options.out.is_dir() else options.out).with_suffix(".workflow.json")
    try:
        path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise Refused("report.unwritten", error=str(error)) from None
    contains = "the nodes, their links, numbers and choices, versions, and the classes of networks"
    log.info("written: %s. It contains %s: no texts, no titles, no notes, no names of files.", path, contains)
    return 0


def _measure(options: argparse.Namespace, comfyui: str) -> int:
    gpus = torch.cuda.device_count() if options.devices == "cuda" else 0
    if options.devices == "cuda" and not gpus:
        log.info("torch sees no CUDA device here; --devices cpu tries the report itself, with a tiny network")
        return 1
    divided = placements(options.world, gpus)
    page = Page(options.out, machine(comfyui))
    page.section("FLUX with random weights on the workers")
    try:
        no_comfyui = {"what": "not run", "note": "no ComfyUI here; --comfyui names its folder"}
        for row in measurements(comfyui, divided) if comfyui else [no_comfyui]:
            page.add(row)
            log.info("%s", in_a_line(row))
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


class Page:
    """The two files of a report, by their path without endings or their folder. Raises Refused if unwritable."""

    def __init__(self, out: Path, machine: dict[str, Any]) -> None:
        self.out = out / NAME if out.is_dir() else out.with_suffix("") if out.suffix in ENDINGS else out
        self._lines, self._text = (self.out.with_name(self.out.name + ending) for ending in ENDINGS)
        self._machine = machine
        self._sections: list[tuple[str, list[Measurement]]] = []
        try:
            self._lines.write_text(json.dumps({"machine": machine}) + "\n")
            self._write()
        except OSError as error:
            raise Refused("report.unwritten", error=str(error)) from None

    def section(self, title: str) -> None:
        self._sections.append((title, []))

    def add(self, measurement: Measurement) -> None:
        title, measurements = self._sections[-1]
        measurements.append(measurement)
        with self._lines.open("a") as file:
            file.write(json.dumps({"section": title, **measurement}) + "\n")
        self._write()

    def _write(self) -> None:
        lines = ["## Machine", *(f"- {name}: {value}" for name, value in self._machine.items() if name != "topology")]
        if self._machine.get("topology"):
            lines += ["", "```", self._machine["topology"], "```"]
        for title, measurements in self._sections:
            rows = [_cells(measurement) for measurement in measurements]
            names = [name for name in COLUMNS if any(name in row for row in rows)]
            table = [[COLUMNS[name][1] or name for name in names], ["---"] * len(names)]
            table += [[row.get(name, "") for name in names] for row in rows]
            lines += ["", f"## {title}", "", *(f"| {' | '.join(row)} |" for row in table)]
        self._text.write_text("\n".join(lines) + "\n")


def in_a_line(measurement: Measurement) -> str:
    """Returns the measurement as a line of the terminal."""
    return ", ".join(COLUMNS[name][2].format(cell) for name, cell in _cells(measurement).items())


def _cells(measurement: Measurement) -> dict[str, str]:
    """Returns what is written in each column that is not empty."""
    if "failed" in measurement:
        measurement = measurement | {"note": f"FAILED: {measurement['failed']}"}
    filled = {name: value for name in COLUMNS if (value := measurement.get(name)) not in (None, "")}
    return {name: COLUMNS[name][0].format(value).replace("|", "/") for name, value in filled.items()}


def placements(worlds: Sequence[int], gpus: int) -> list[Placement]:
    """Returns the devices of as many workers as each number of `worlds`; without `gpus` on the CPU. One GPU is also
    tried by two workers, for their error. Raises Refused where all numbers are larger than that of the GPUs."""
    if not gpus:
        return [Placement(devices=("cpu",) * world) for world in worlds]
    found = [Placement(devices=tuple(f"cuda:{n}" for n in range(world))) for world in worlds if world <= gpus]
    if gpus == 1 and 2 in worlds:
        found.append(Placement(devices=("cuda:0", "cuda:0")))
    if not found:
        raise Refused("report.world", world=min(worlds), gpus=gpus)
    return found


def measurements(comfyui: str, placements: Sequence[Placement]) -> Iterator[Measurement]:
    """Yields a row for each start of a group and each division over its workers. An error is a row, too."""
    on_cpu = placements[0].device_kind == "cpu"
    flags = ("--cpu", "--use-pytorch-cross-attention") if on_cpu else ()
    setup = ComfySetup(root=comfyui, flags=flags, folder=os.getcwd())
    import_comfyui(setup, torch.device("cpu"))
    with TemporaryDirectory() as folder:
        spec, job = _flux(Path(folder, "flux.safetensors"), tiny=on_cpu)
        exact: Tensor | None = None
        for placement in placements:
            workers, started = placement.world_size, time.monotonic()
            note = {"note": "on one device: only the error counts"} if placement.shared and not on_cpu else {}
            labels: Measurement = {"workers": workers} | note
            try:
                with WorkerGroup(placement, setup) as group:
                    row = labels | {"what": "start of the workers", "seconds": time.monotonic() - started}
                    speed = group.profile.bytes_per_second / 1e9
                    yield row | ({"links": speed} if speed else {})
                    both = {(2, workers // 2)} if workers % 4 == 0 else set()
                    for ring, ulysses in sorted({(workers, 1), (1, workers)} | both):
                        degrees = Parallelism(ring_degree=ring, ulysses_degree=ulysses)
                        results = [group.run(spec, degrees, job) for _ in range(WARM_UP + STEPS)]
                        out = results[-1].value["out"].clone()
                        exact = out if exact is None else exact
                        row = labels | {"what": "a step", "degrees": f"ring {ring} x Ulysses {ulysses}"}
                        row["seconds"] = statistics.median(result.seconds for result in results[WARM_UP:])
                        row["error"] = mean_error(out, exact)
                        if group.readings:
                            row["gib"] = max(reading.used_bytes for reading in group.readings) / 2**30
                        yield row
            except ParallelError as error:
                yield labels | {"what": "the rest of these workers", "failed": str(error)}


def _flux(path: Path, *, tiny: bool) -> tuple[ModelSpec, EvaluationJob]:
    """Writes the network to a file, and returns what workers load and evaluate."""
    import comfy.ldm.flux.model
    import comfy.ops
    import comfy.utils

    from ..loading.object_codec import Describer

    config, dtype = (TINY, torch.float32) if tiny else (CONFIG, torch.bfloat16)
    torch.manual_seed(0)
    network = comfy.ldm.flux.model.Flux(**config, dtype=dtype, device="cpu", operations=comfy.ops.disable_weight_init)
    comfy.utils.save_torch_file(randomized(network).state_dict(), str(path))
    rows, text = (9, 7) if tiny else (128, 512)
    arguments = {
        "x": torch.randn(1, 16, rows, rows, dtype=dtype),
        "timestep": torch.full((1,), 0.5, dtype=dtype),
        "context": torch.randn(1, text, config["context_in_dim"], dtype=dtype),
        "y": torch.randn(1, config["vec_in_dim"], dtype=dtype),
        "guidance": torch.full((1,), 3.5, dtype=dtype),
    }
    name = str(dtype).removeprefix("torch.")
    spec = ModelSpec(
        loader="comfy.sd:load_diffusion_model", arguments=json.dumps([str(path), {"dtype": {"torch.dtype": name}}]),
        files=(stat_file(str(path)),), weight_dtype=name,
    )  # fmt: skip
    options = Describer().described({})
    return spec, EvaluationJob(
        call_arguments=arguments, options=options, cond_arguments={}, weight_patches=None, batch_coupled=False
    )


def randomized(network: nn.Module) -> nn.Module:
    """Returns the network with random weights that keep numbers about as large as they are."""
    for name, parameter in network.named_parameters():
        deviation = max(parameter[0].numel() if parameter.ndim > 1 else 100, 1) ** -0.5
        around = 1.0 if parameter.ndim < 2 and name.endswith(("weight", "scale")) else 0.0
        value = torch.randn(parameter.shape, device=parameter.device) * deviation + around
        parameter.data = value.to(parameter.dtype)
    return network.eval().requires_grad_(False)


def mean_error(out: Tensor, exact: Tensor) -> float:
    """Returns the mean difference, in standard deviations of the exact result; NaN where one is."""
    return float((out.double() - exact.double()).abs().mean() / exact.double().std()) if out.numel() else 0.0


def compare(workflow: Any, comfyui: str, arguments: Sequence[str]) -> int:
    """Prints how far apart each sampler's step is; returns 0 if all are equal. `arguments` are ComfyUI's own. Raises
    Refused, for example for a workflow that was not exported for the API, or that nothing samples on workers."""
    prompt = calls_of(workflow)
    if not comfyui:
        raise Refused("report.no_comfyui")
    with TemporaryDirectory(prefix="cp-") as folder, _comfyui(comfyui, Path(folder), arguments) as ask:
        if NODE not in ask("/object_info"):
            raise Refused("report.no_pack")
        log.info("one step of each sampler, on the workers and in ComfyUI's process")
        body = {"prompt": {**prompt, NODE: {"class_type": NODE, "inputs": {}}}, "partial_execution_targets": [NODE]}
        number = ask("/prompt", body)["prompt_id"]
        while not (history := ask(f"/history/{number}")):
            time.sleep(0.5)
    run = history[number]
    for kind, message in run["status"]["messages"]:
        if kind == "execution_error":
            node = f"{message['node_type']} ({message['node_id']})"
            raise Refused("report.node_failed", node=node, error=message["exception_message"].strip())
    shown = next(one for one in run["outputs"].values() if "cp_compare" in one)
    for text in shown["text"]:
        log.info("%s", text)
    (table,) = shown["cp_compare"]
    return int(bool(table["troubles"]) or not table["rows"])


@contextmanager
def _comfyui(root: str, folder: Path, arguments: Sequence[str]) -> Iterator[Callable[..., Any]]:
    """Starts a ComfyUI, whose temporary files are in `folder`, and ends it. Yields what asks a path of it, with a body
    or without one, and raises Refused where ComfyUI has ended or refuses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [sys.executable, "main.py", "--port", str(port), "--disable-auto-launch", "--temp-directory", str(folder)]
    command += ["--output-directory", str(folder), "--database-url", "sqlite:///:memory:", *arguments]
    output = folder / "comfyui.log"
    log.info("starting ComfyUI in %s", root)
    with output.open("wb") as file:
        process = subprocess.Popen(command, cwd=root, stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    def ask(path: str, body: dict[str, Any] | None = None) -> Any:
        if process.poll() is not None:
            text = output.read_text(encoding="utf-8", errors="replace")[-LOG_CHARACTERS:]
            raise Refused("report.comfyui_ended", code=process.returncode, log=text)
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as refused:
            raise Refused("report.prompt", answer=refused.read().decode(errors="replace")) from None

    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            with suppress(OSError):  # it does not listen yet
                ask("/queue")
                break
            if time.monotonic() > deadline:
                raise Refused("report.comfyui_silent", seconds=f"{START_SECONDS:.0f}")
            time.sleep(0.2)
        yield ask
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        process.kill()  # which does nothing to one that has ended
        process.wait()
