"""What a rank holds, fetches and waits for in each place for weights: local bytes, peak, fetched bytes, time.

    python -m tests.bench.weights [--world 2] [--tokens 576] [--rounds 4] [--json out.json]

On the CPU the device is main memory too: "copied" makes of `offload` what it is for a GPU, a copy to other memory, and
"in place" is what CPU workers do. Modes take turns.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from parallel_runtime.for_diffusers import attach
from parallel_runtime.specs import Parallelism
from parallel_runtime.worker.engine.mesh import ContextMesh, build_mesh, with_own_group
from parallel_runtime.worker.weights.places import HostCopy, Shards
from parallel_runtime.worker.weights.store import Buffers, Source, Store, weight_bytes

from .flux_like import build, inputs
from .launch import is_rank, join, launch
from .memory import peak_bytes

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
MODES = ("replicate", "shard", "offload, copied", "offload, in place")


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    options = _options()
    if not is_rank():
        with tempfile.TemporaryDirectory() as folder:
            network = build(options.double, options.single, options.heads)
            save_file(network.state_dict(), Path(folder) / "weights.safetensors")
            os.environ["BENCH_WEIGHTS"] = str(Path(folder) / "weights.safetensors")
            return launch("tests.bench.weights", options.world, sys.argv[1:])
    rank, world = join()
    os.environ |= {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    with torch.inference_mode():
        rows = _measure(options, rank, world)
    if rank == 0:
        _report(rows, options.json)
    dist.destroy_process_group()
    return 0


def _measure(options: argparse.Namespace, rank: int, world: int) -> list[dict[str, Any]]:
    parallelism = Parallelism(ulysses_degree=world)
    mesh, given = build_mesh(parallelism), inputs(options.tokens)
    rows, made = [], {}
    for mode in MODES:
        network = _mapped(options)
        attach(network, mesh, parallelism)
        peak = peak_bytes(lambda network=network, mode=mode: made.update({mode: _placed(network, mode, mesh, rank)}))
        _, store = made[mode]
        whole = weight_bytes(network)
        away = store.away_bytes - store.device_bytes if store else 0
        rows.append({"mode": mode, "held": whole - away, "peak": peak, "whole": whole, "seconds": [], "fetched": 0})
    want = None
    for _ in range(1 + options.rounds):
        for row in rows:
            network, store = made[row["mode"]]
            dist.barrier()
            started = time.perf_counter()
            out = network(**given, return_dict=False)[0]
            row["seconds"].append(time.perf_counter() - started)
            want = out if want is None else want
            row["equal"] = torch.equal(out, want)
            row["fetched"] = _fetched(store) if store else 0
    for row in rows:
        row["seconds"] = statistics.median(row["seconds"][1:])
    return rows


def _fetched(store: Store) -> int:
    """In one evaluation."""
    return store.away_bytes if store.fetches else 0


def _mapped(options: argparse.Namespace) -> Any:
    """A network whose weights are views of the mapped file."""
    network = build(options.double, options.single, options.heads)
    weights = load_file(os.environ["BENCH_WEIGHTS"])
    for name, parameter in network.named_parameters():
        parameter.data = weights[name]
    return network


def _placed(network: Any, mode: str, mesh: ContextMesh, rank: int) -> tuple[Any, Store | None]:
    blocks = [*network.transformer_blocks, *network.single_transformer_blocks]
    store = None if mode == "replicate" else Store(network, _source(mode, mesh, rank), Buffers(CPU))
    if store is not None:
        for block in blocks:
            store.put(block)
    stored = {id(parameter) for block in blocks for parameter in block.parameters()} if store else set()
    for parameter in network.parameters():
        if id(parameter) not in stored:
            parameter.data = _on_the_device(parameter.data)
    if store is not None:
        store.seal()
    return network, store


def _on_the_device(weight: Tensor) -> Tensor:
    return weight.clone()


def _source(mode: str, mesh: ContextMesh, rank: int) -> Source:
    if mode == "shard":
        return Shards(with_own_group(mesh.context, CPU))
    return HostCopy(CPU, range(dist.get_world_size()), rank, staged=mode == "offload, copied")


def _report(rows: list[dict[str, Any]], path: Path | None) -> None:
    log.info("%-18s %10s %10s %12s %10s %6s", "mode", "held MB", "peak MB", "fetched MB", "median s", "equal")
    for row in rows:
        numbers = [row[name] / 1e6 for name in ("held", "peak", "fetched")]
        log.info("%-18s %10.1f %10.1f %12.1f %10.3f %6s", row["mode"], *numbers, row["seconds"], row["equal"])
    if path:
        path.write_text(json.dumps(rows, indent=1) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=576)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--double", type=int, default=2)
    parser.add_argument("--single", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
