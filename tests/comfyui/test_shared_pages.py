"""Workers of one machine share the pages of a model's file: none of them holds a copy of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ..zoo import checkpoints
from .cases import DEGREES
from .client import Graph
from .graphs import Job, Parallel, sampling_graph, with_loras
from .latents import apart, latent_of
from .server import Server

JOB = Job(family="flux_dev", steps=1)
THREE = DEGREES["ring_3"]
WORKERS = THREE.workers  # in every case: see conftest.py
COPIES = 60  # of one block: a file large beside what a worker holds anyway


def write_large(folder: Path, dtype: torch.dtype) -> Path:
    source = folder / f"{JOB.family}.safetensors"
    weights = {name: tensor.to(dtype) for name, tensor in load_file(source).items()}
    block = {name: tensor for name, tensor in weights.items() if name.startswith("single_blocks.0.")}
    for index in range(2, COPIES):
        weights |= {name.replace(".0.", f".{index}.", 1): tensor.clone() for name, tensor in block.items()}
    with safe_open(source, framework="pt") as file:
        save_file(weights, path := folder / f"large_{str(dtype)[6:]}.safetensors", metadata=file.metadata())
    return path


def mapped_bytes(pid: int, *kinds: str) -> int:
    """What a process maps, of the kinds whose names in /proc's summary begin so."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(kinds))


def written_bytes(server: Server) -> int:
    """What the workers hold beside the pages of files: their own memory, and what they share in a memory file once."""
    return sum(mapped_bytes(process.pid, "Pss_Anon", "Pss_Shmem") for process in server.workers().values())


def write_lora(path: Path) -> None:
    """For a layer of every one of those blocks, so that none of them is any more what the file has."""
    dice = torch.Generator().manual_seed(5)
    shape = checkpoints.tensors(JOB.family)[0]["single_blocks.0.linear1.weight"].shape
    weights = {}
    for index in range(COPIES):
        name = f"diffusion_model.single_blocks.{index}.linear1"
        weights[f"{name}.lora_up.weight"] = torch.randn(shape[0], 2, generator=dice) * 0.02
        weights[f"{name}.lora_down.weight"] = torch.randn(2, shape[1], generator=dice) * 0.02
    save_file(weights, path)


def graph_of(file: str, sampler: str, parallel: Parallel = THREE) -> Graph:
    graph = sampling_graph(JOB, sampler, parallel if sampler == "CPSampler" else None)  # type: ignore[arg-type]
    graph["model"]["inputs"]["unet_name"] = file
    return graph


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["widened", "as it is"])
@pytest.mark.sweep(one_in=2)
def test_a_worker_holds_less_than_a_tenth_of_the_file_for_itself(server: Server, dtype: torch.dtype) -> None:
    """ComfyUI computes in float32 here: what the file holds in bfloat16 is widened as it is used."""
    path = write_large(server.base / "models" / "diffusion_models", dtype)
    server.client.run(sampling_graph(JOB, "CPSampler", THREE))
    before = {process.pid: mapped_bytes(process.pid, "Private_") for process in server.workers().values()}
    got = latent_of(server.client.run(graph_of(path.name, "CPSampler")))
    after = {process.pid: mapped_bytes(process.pid, "Private_") for process in server.workers().values()}
    assert after.keys() == before.keys()
    size = path.stat().st_size
    grown = {pid: (after[pid] - before[pid]) / size for pid in after}
    print(f"a file of {size / 2**20:.0f} MiB, private memory of each worker grew by {grown}")
    assert max(grown.values()) < 0.1
    assert apart(got, latent_of(server.client.run(graph_of(path.name, "KSampler")))) <= 1e-4


@pytest.mark.parametrize(("lora", "copies"), [(False, 0), (True, 1)], ids=["the file's", "patched"])
@pytest.mark.sweep(one_in=2)
def test_weights_in_main_memory_are_there_once_for_three_workers(server: Server, lora: bool, copies: int) -> None:
    path = write_large(server.base / "models" / "diffusion_models", torch.float32)
    write_lora(server.base / "models" / "loras" / "of_large.safetensors")
    in_main_memory = replace(THREE, weights="offload")
    graph = graph_of(path.name, "CPSampler", in_main_memory)
    if lora:
        with_loras(graph, [("of_large.safetensors", 0.7)])
    server.client.post("/cp/restart")  # fresh workers hold nothing of other tests that a new model would push out
    server.client.run(sampling_graph(JOB, "CPSampler", in_main_memory))
    before = written_bytes(server)
    server.client.run(graph)
    grown = (written_bytes(server) - before) / path.stat().st_size
    print(f"a file of {path.stat().st_size / 2**20:.0f} MiB, the workers' own memory grew by {grown:.2f} of it in all")
    assert abs(grown - copies) < 0.2
