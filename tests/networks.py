"""python -m tests.networks draft|check SUBJECT.py: see parallel_runtime/architectures/README.md.

A plan's first draft comes from three forwards: what changes with the latent, what with the text. It finds stacks,
streams and most arguments. It cannot see the order of streams, which attention is local, or what the forwards did not
bring (masks, references, times of their own). A check is a plan on two and three CPU ranks against the network
undivided.
"""

from __future__ import annotations

import argparse
import inspect
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from parallel_runtime.architectures import architecture_of
from parallel_runtime.commands.report import randomized
from parallel_runtime.engine.comm.mesh import ContextMesh, build_mesh
from parallel_runtime.specs import ComfySetup, ModelSpec, Parallelism
from parallel_runtime.worker.comfy_loop import import_comfyui
from parallel_runtime.worker.models import Model

from .bench.report.measuring import Case, Measurement, Setting
from .bench.report.part import measurements_of

PART = "tests.networks"  # whose `cases` the ranks of a check measure
EXACT = 1e-5
CHECKED = {
    "ring 2, ulysses 1": Parallelism(ring_degree=2),
    "ring 1, ulysses 2": Parallelism(ulysses_degree=2),
    "pipeline 2": Parallelism(pipeline_degree=2),
    "ring 3, ulysses 1": Parallelism(ring_degree=3),
}
CHECK_SECONDS = 600.0  # for the divisions over as many ranks

Subject = tuple[nn.Module, list[dict[str, Any]]]  # a call, the same with a larger latent, and with a longer prompt
Shapes = dict[str, dict[str, tuple[int, ...]]]  # stack: argument: shape, and "returns"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.networks", description="Write the split plan of a network of ComfyUI."
    )
    parser.add_argument(
        "action", choices=("draft", "check"), help="print a plan's first draft, or try the plan there is"
    )
    parser.add_argument(
        "subject",
        type=Path,
        help="a file with network() and inputs(rows=0, text=0), see parallel_runtime/architectures/README.md",
    )
    parser.add_argument("--comfyui", type=Path, default=Path(), help="a checkout of ComfyUI")
    options = parser.parse_args(arguments)
    if options.action == "draft":
        sys.stdout.write(draft(options.subject, options.comfyui))
        return 0
    return check(options.subject, options.comfyui)


def load_subject(path: Path, comfyui: Path) -> Subject:
    """Runs the file at `path`, with ComfyUI importable and set to the CPU and float32."""
    if not path.is_file():
        raise SystemExit(f"{path} is no file; write one as architectures/README.md shows")
    flags = ("--force-fp32", "--use-pytorch-cross-attention")
    import_comfyui(ComfySetup(root=str(comfyui.resolve()), flags=flags, folder=os.getcwd()), torch.device("cpu"))
    module = SimpleNamespace(**runpy.run_path(str(path), run_name="subject"))
    torch.manual_seed(1)
    network = randomized(module.network())
    return network, [_seeded(module, **more) for more in ({}, {"rows": 2}, {"text": 3})]


def run(network: nn.Module, call: dict[str, Any]) -> list[Tensor]:
    with torch.inference_mode():
        out = network(**tree_map_only(Tensor, Tensor.clone, call), transformer_options={})
    return [out] if isinstance(out, Tensor) else list(out)


def _seeded(module: Any, **more: int) -> dict[str, Any]:
    torch.manual_seed(2)
    call: dict[str, Any] = module.inputs(**more)
    return call


def check(path: Path, comfyui: Path) -> int:
    """Prints the error of each division against one process; returns 1 if one is not exact, or is refused."""
    network, _ = load_subject(path, comfyui)
    if architecture_of(network) is None:
        kind = type(network)
        sys.stdout.write(f"no plan for {kind.__module__}:{kind.__qualname__} is registered\n")
        return 1
    failed = 0
    for ranks in sorted({degrees.world_size for degrees in CHECKED.values()}):
        setting = Setting(kind="cpu", world_size=ranks, subject=(str(path.resolve()), str(comfyui.resolve())))
        for measurement in measurements_of(PART, setting, processes=ranks, seconds=CHECK_SECONDS):
            words = measurement.get("failed") or measurement.get("note")
            words = words or f"{measurement['error']:.1e} of the largest value"
            sys.stdout.write(f"{measurement['what']}: {words}\n")
            failed |= measurement.get("error", 1.0) > EXACT
    return failed


def cases(setting: Setting, device: torch.device) -> Iterator[Case]:
    """Yields the divisions of the setting's subject over all ranks."""
    network, calls = load_subject(*map(Path, setting.subject))
    model = Model(ModelSpec(loader=""), network, architecture_of(network))
    for name, degrees in CHECKED.items():
        if degrees.world_size == setting.world_size:
            yield Case({"what": name}, partial(_compare, model, calls, degrees))


def _compare(model: Model, calls: Sequence[dict[str, Any]], degrees: Parallelism) -> Measurement:
    mesh, worst = build_mesh(degrees), 0.0
    for call in calls:
        expected = run(model.network, call)
        try:
            model.parallelize(mesh, degrees)
            outputs = run(model.network, call)
        except ValueError as refused:
            return {"note": " ".join(str(refused).split())}
        finally:
            model.parallelize(ContextMesh(), Parallelism())
        pairs = zip(outputs, expected, strict=True)
        worst = max(worst, *((a - b).abs().max().item() / b.abs().max().item() for a, b in pairs))
    return {"error": worst}


def draft(path: Path, comfyui: Path) -> str:
    """Returns the ModulePlans of a plan as Python, to be completed."""
    network, calls = load_subject(path, comfyui)
    seen = [_observe(network, call) for call in calls]
    lines = [f"# {type(network).__module__}:{type(network).__qualname__}"]
    for stack in seen[0]:
        lines += _module_plan_text(stack, [shapes[stack] for shapes in seen])
    return "\n".join(
        [*lines, "# then: the final layer or gathers=True, the order of streams, submodule_attends={...}", ""]
    )


def _observe(network: nn.Module, call: dict[str, Any]) -> Shapes:
    seen: Shapes = {}
    handles = []
    for name, stack in network.named_modules():
        if isinstance(stack, nn.ModuleList) and len(stack) and "." not in name:
            handles.append(stack[0].register_forward_hook(_recorder(seen, name), with_kwargs=True))
    run(network, call)
    for handle in handles:
        handle.remove()
    return seen


def _recorder(seen: Shapes, stack: str) -> Any:
    def record(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        names = list(inspect.signature(type(block).forward).parameters)[1:]
        arguments = {names[n] if n < len(names) else str(n): value for n, value in enumerate(args)} | kwargs
        tensors = {name: shape for name, value in arguments.items() for shape in _shapes(value)}
        seen[stack] = tensors | {f"returns {n}": shape for n, shape in enumerate(_shapes(out))}

    return record


def _shapes(value: Any) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _module_plan_text(stack: str, runs: list[dict[str, tuple[int, ...]]]) -> list[str]:
    arguments = {name: shape for name, shape in runs[0].items() if not name.startswith("returns ")}
    returned = {shape for name, shape in runs[0].items() if name not in arguments}
    causes = {name: next(((dim, cause) for dim in range(len(shape)) if (cause := _cause(name, dim, runs))), None)
              for name, shape in arguments.items()}  # fmt: skip
    tokens = {name: follows for name, follows in causes.items() if follows and arguments[name] in returned}
    streams = list(dict.fromkeys(cause for _, cause in tokens.values()))
    specs, unsplit = [], []
    for name, follows in causes.items():
        if follows is None or (name not in tokens and follows[1] not in [*streams, "joint"]):
            unsplit.append(name)  # what follows a stream without tokens here is read as keys
            continue
        dim, cause = follows
        over = streams if cause == "joint" and "joint" not in streams else [cause]
        suffix = f", {dim}" if dim != 1 else ""
        specs.append(f'"{name}": {"Split" if name in tokens else "SplitLike"}({tuple(over)}{suffix})')
    module_plan = f'"{stack}", {{{", ".join(specs)}}}, attends={tuple(streams)}, unsplit_args={tuple(unsplit)}'
    return [f"ModulePlan({module_plan}),"] if specs else []


def _cause(name: str, dim: int, runs: list[dict[str, tuple[int, ...]]]) -> str:
    """Returns the stream that a dim belongs to: it grew with the latent, with the text, or with both."""
    base, rows, text = (run.get(name, ()) for run in runs)
    if len(rows) <= dim or len(text) <= dim:
        return ""
    grew = (rows[dim] != base[dim], text[dim] != base[dim])
    return {(True, False): "image", (False, True): "text", (True, True): "joint"}.get(grew, "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
