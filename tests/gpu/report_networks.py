"""One rank of the report's networks, in ComfyUI's python: its own FLUX and Wan with random weights, divided over the
ranks against undivided on this one.

Started by tests.gpu.report. Errors are mean differences over the undivided result's deviation, on the worst rank.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_runtime.blocks import blocks_of
from parallel_runtime.specs import Parallelism, Storage, WeightsMode
from parallel_runtime.worker.engine.divide import divide, undivide
from parallel_runtime.worker.engine.mesh import ContextMesh, build_mesh
from parallel_runtime.worker.link import give_back_cache
from parallel_runtime.worker.weights.buffers import Buffers
from parallel_runtime.worker.weights.places import place
from parallel_runtime.worker.weights.store import Store

from ..bench.launch import is_rank, launch
from ..networks import tiny
from .report_ranks import degrees_of, joined, milliseconds

Row = dict[str, Any]
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A network by its class and configuration, and the shapes of what it is given."""

    path: str
    config: dict[str, Any]
    latent: Shape
    text: Shape
    pooled: int = 0

    def inputs(self, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        given: dict[str, Any] = {"x": self.latent, "context": self.text}
        given |= {"y": (1, self.pooled)} if self.pooled else {}
        made = {name: torch.randn(shape, device=device).to(dtype) for name, shape in given.items()}
        made |= {"guidance": torch.full((1,), 3.5, device=device, dtype=dtype)} if self.pooled else {}
        return made | {"timestep": torch.full((1,), 0.5, device=device, dtype=dtype)}


FLUX = tiny.FLUX | dict(
    vec_in_dim=768, context_in_dim=4096, hidden_size=3072, num_heads=24, depth=19, depth_single_blocks=38,
    axes_dim=[16, 56, 56],
)  # fmt: skip
WAN = tiny.WAN | dict(dim=5120, ffn_dim=13824, freq_dim=256, text_dim=4096, num_heads=40, num_layers=40)
SUBJECTS = {
    "whole": {
        "FLUX, 1024 x 1024": Subject(
            path="flux.model:Flux", config=FLUX, latent=(1, 16, 128, 128), text=(1, 512, 4096), pooled=768
        ),
        "Wan 14B, 832 x 480, 81 frames": Subject(
            path="wan.model:WanModel", config=WAN, latent=(1, 16, 21, 60, 104), text=(1, 512, 4096)
        ),
    },
    "tiny": {
        "FLUX, tiny": Subject(
            path="flux.model:Flux", config=tiny.FLUX, latent=(1, 16, 9, 14), text=(1, 7, 96), pooled=64
        ),
        "Wan, tiny": Subject(path="wan.model:WanModel", config=tiny.WAN, latent=(1, 16, 3, 6, 10), text=(1, 7, 96)),
    },
}
WEIGHTS = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}


def main() -> int:
    options = _options()
    if not is_rank():
        return launch("tests.gpu.report_networks", options.launch, sys.argv[1:])
    device = joined(options.device)
    os.environ |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}  # as torchrun says of one machine
    tiny.start_comfyui()
    rows: list[Row] = []
    for name, subject in SUBJECTS["whole" if device.type == "cuda" else "tiny"].items():
        for held, weights in WEIGHTS.items():
            rows += _rows(name, subject, held, weights, device)
            gc.collect()  # of the next one there would be no room beside it
            give_back_cache(device)
    if int(os.environ["RANK"]) == 0:
        options.out.write_text(json.dumps(rows))
    dist.destroy_process_group()
    return 0


@torch.inference_mode()
def _rows(name: str, subject: Subject, held: str, weights: torch.dtype, device: torch.device) -> list[Row]:
    from ..networks.cases import plan_of

    torch.manual_seed(0)
    network = _network(subject, weights, device)
    inputs = subject.inputs(device, torch.bfloat16)

    def run() -> Tensor:
        return network(**inputs, transformer_options={})

    plain = run()
    alone = milliseconds(run, device)
    rows = [_row(name, held, "ComfyUI's own", 0.0, alone, alone)]
    blocks = blocks_of(network, plan_of(network).plan)
    for number, (way, parallelism) in enumerate(degrees_of("auto") or [("1 rank", Parallelism())]):
        mesh = build_mesh(parallelism, device)
        divide(network, plan_of(network).plan, mesh, parallelism)
        for mode in get_args(WeightsMode) if number == 0 else ("replicate",):
            storage = Storage(mode=mode)
            with _at_rest(network, blocks, storage, mesh, device) as there:
                if there:
                    error = _worst((run() - plain).float().abs().mean() / plain.float().std())
                    words = way if mode == "replicate" else f"{way}, {mode}"
                    rows.append(_row(name, held, words, error, alone, milliseconds(run, device)))
        undivide(network)
    return rows


@contextmanager
def _at_rest(
    network: nn.Module, blocks: list[nn.Module], storage: Storage, mesh: ContextMesh, device: torch.device
) -> Iterator[bool]:
    """All of its blocks where `storage` says, beside the weights themselves; no where that cannot be."""
    where = place(storage, mesh.context, device, Buffers(device))
    if where is None:
        yield storage.mode == "replicate"
        return
    whole = {module: dict(module._parameters) for block in blocks for module in block.modules()}
    store = Store(network, where.source(), where.buffers)
    try:
        for block in blocks:
            store.put(block)
        store.seal()
        yield True
    finally:
        store.close()
        for module, parameters in whole.items():
            module._parameters.update(parameters)


def _network(subject: Subject, weights: torch.dtype, device: torch.device) -> nn.Module:
    """As ComfyUI builds it: layers that cast their weights as they compute."""
    import comfy.ops

    kind = tiny.kind_of(subject.path)
    network: nn.Module = kind(**subject.config, dtype=weights, device=device, operations=comfy.ops.manual_cast).eval()
    for tensor in [*network.parameters(), *network.buffers()]:
        if tensor.is_floating_point() and tensor.numel():
            deviation = 1 / math.sqrt(tensor[0].numel()) if tensor.ndim > 1 else 0.1
            tensor.data = (torch.randn(tensor.shape, device=device) * deviation).to(tensor.dtype)
    return network.requires_grad_(False)


def _worst(error: Tensor) -> float:
    found = error.double().cpu()
    dist.all_reduce(found, dist.ReduceOp.MAX)
    assert not found.isnan(), "NaN"
    return float(found)


def _row(name: str, held: str, way: str, error: float, alone: float, together: float) -> Row:
    faster = alone / together
    return {"what": name, "weights": held, "degrees": way, "error": error, "ms": together, "faster": faster}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--launch", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=4608)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
