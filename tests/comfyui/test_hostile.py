"""Broken files and senseless inputs: a clear error, or what KSampler makes of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from .cases import DEGREES
from .client import NodeError
from .graphs import Job, sampling_graph
from .latents import apart, latent_of
from .server import Server

FLUX = Job(family="flux_dev", cfg=2.0)
RING_2 = DEGREES["ring_2"]


def cut_short(content: bytes) -> bytes:
    return content[: len(content) // 2]


def lying(content: bytes) -> bytes:
    """The first shape that the header names is another one."""
    at = content.index(b'"shape":[') + len(b'"shape":[')
    return content[:at] + (b"1" if content[at : at + 1] != b"1" else b"2") + content[at + 1 :]


def damaged(content: bytes) -> bytes:
    return content[:8] + b"?" + content[9:]


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize(
    "broken", [cut_short, lying, damaged, lambda _: b""], ids=["cut short", "lying", "damaged", "empty"]
)
def test_a_broken_file_is_refused_by_its_name(server: Server, broken: Callable[[bytes], bytes]) -> None:
    models = server.base / "models" / "diffusion_models"
    file = models / "broken.safetensors"
    file.write_bytes(broken((models / "flux_dev.safetensors").read_bytes()))
    graph = sampling_graph(FLUX, "CPSampler", RING_2)
    graph["model"] = {"class_type": "CPLoadDiffusionModel", "inputs": {"unet_name": file.name}}
    before = server.children()
    try:
        with pytest.raises(
            NodeError, match=r"(?s)CPLoadDiffusionModel.*broken.safetensors is not a valid safetensors file.*download"
        ):
            server.client.run(graph)
    finally:
        file.unlink()
    assert server.children() == before


@pytest.mark.sweep
def test_a_latent_without_numbers_comes_out_as_from_ksampler(server: Server) -> None:
    job = replace(FLUX, latent_seed=-2, denoise=0.5)
    want = latent_of(server.client.run(sampling_graph(job, "KSampler")))
    got = latent_of(server.client.run(sampling_graph(job, "CPSampler", RING_2)))
    assert want.isnan().all()
    assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("size", [(1, 1), (2, 3), (1, 129)])
def test_a_latent_of_an_absurd_size_comes_out_as_from_ksampler(server: Server, size: tuple[int, int]) -> None:
    job = replace(FLUX, size=size)
    want = latent_of(server.client.run(sampling_graph(job, "KSampler")))
    assert apart(latent_of(server.client.run(sampling_graph(job, "CPSampler", RING_2))), want) <= 1e-4


def test_a_model_deep_in_folders_with_names_of_every_script_is_found(server: Server) -> None:
    """4 KB of path are what Linux takes; names of 85 characters of 3 bytes are what its file systems take."""
    models = server.base / "models" / "diffusion_models"
    folder, left = Path("deep"), 4000 - len(str(models))
    while len(bytes(folder)) + 256 < left:
        folder /= "画" * 85
    (models / folder).mkdir(parents=True)
    shutil.copy(models / "flux_dev.safetensors", models / folder / "flux ünï.safetensors")
    want = latent_of(server.client.run(sampling_graph(FLUX, "KSampler")))
    graph = sampling_graph(FLUX, "CPSampler", RING_2)
    graph["model"]["inputs"]["unet_name"] = str(folder / "flux ünï.safetensors")
    try:
        assert apart(latent_of(server.client.run(graph)), want) <= 1e-4
    finally:
        shutil.rmtree(models / "deep")
