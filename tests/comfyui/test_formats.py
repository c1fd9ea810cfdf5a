"""Every format of a file that ComfyUI reads gives KSampler's latent: the workers load it by ComfyUI's own loader."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from .cases import ALONE, DEGREES
from .client import Graph
from .graphs import Job, Parallel, sampling_graph, with_loras
from .latents import apart, latent_of
from .server import Server
from .test_foreign import hooked
from .test_kin import node, on_the_loader
from .write_formats import FORMATS

JOB = Job(family="flux_dev", cfg=2.0, size=(9, 14), prompt_tokens=(7, 12))
DEGREES_AND_BARS = {"ring_2": 1e-5, "1_worker": 1e-6}  # of the latent's standard deviation
ROUNDED = {"int8": 3e-2, "int8_convrot": 3e-2}  # activations are rounded too: one unit in the last place flips codes


@pytest.fixture(scope="module")
def server_of_files(formats: Path, shared_server: Server) -> Server:
    """The session's, with a file of every format, also as a checkpoint."""
    for name in FORMATS:
        checkpoint = shared_server.base / "models" / "checkpoints" / f"{name}.safetensors"
        checkpoint.symlink_to(formats / f"{JOB.family}_{name}.safetensors")
    return shared_server


def file_of(name: str) -> str:
    return f"{JOB.family}{name and '_'}{name}.safetensors"


def picture(name: str, weight_dtype: str, lora: bool, parallel: Parallel | None = None) -> Graph:
    graph = sampling_graph(JOB, "CPSampler" if parallel else "KSampler", parallel)
    graph["model"]["inputs"] |= {"unet_name": file_of(name), "weight_dtype": weight_dtype}
    return with_loras(graph, [("flux_dev.safetensors", 0.8)] if lora else [])


@pytest.fixture(scope="module")
def native(server_of_files: Server) -> Callable[..., Tensor]:
    """KSampler's latent, sampled once."""
    return functools.cache(lambda *what: latent_of(server_of_files.client.run(picture(*what))))


@pytest.mark.sweep(one_in=11)
@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("degrees", ["ring_2", ALONE])
def test_a_file_of_any_format_is_sampled_as_ksampler_does(
    server: Server, native: Callable[..., Tensor], degrees: str, name: str, lora: bool
) -> None:
    got = latent_of(server.client.run(picture(name, "default", lora, DEGREES[degrees])))
    check(got, native(name, "default", lora), name, degrees)


@pytest.mark.sweep(one_in=11)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("sampler", ["CPSampler", "KSampler"])
def test_cp_load_diffusion_model_reads_it_too(
    server: Server, native: Callable[..., Tensor], sampler: str, name: str
) -> None:
    graph = picture(name, "default", False, DEGREES["ring_2"] if sampler == "CPSampler" else None)
    graph = on_the_loader(graph, JOB, DEGREES["ring_2"])
    graph["model"]["inputs"]["unet_name"] = file_of(name)
    check(latent_of(server.client.run(graph)), native(name, "default", False), name, "ring_2")


@pytest.mark.sweep(one_in=4)
@pytest.mark.parametrize("weight_dtype", ["fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"])
@pytest.mark.parametrize("name", ["", "bf16", "scaled_fp8"])
def test_the_loaders_weight_dtype_counts(
    server: Server, native: Callable[..., Tensor], name: str, weight_dtype: str
) -> None:
    got = latent_of(server.client.run(picture(name, weight_dtype, False, DEGREES["ring_2"])))
    check(got, native(name, weight_dtype, False), name, "ring_2")


@pytest.mark.parametrize("sampler", ["CPSampler", "KSampler"])
def test_cp_load_diffusion_model_has_a_weight_dtype_too(
    server: Server, native: Callable[..., Tensor], sampler: str
) -> None:
    graph = picture("bf16", "default", True, DEGREES["ring_2"] if sampler == "CPSampler" else None)
    graph = on_the_loader(graph, JOB, DEGREES["ring_2"])
    graph["model"]["inputs"] |= {"unet_name": file_of("bf16"), "weight_dtype": "fp8_e5m2"}
    check(latent_of(server.client.run(graph)), native("bf16", "fp8_e5m2", True), "bf16", "ring_2")


@pytest.mark.sweep(one_in=11)
@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_of_any_format_too(server_of_files: Server, name: str) -> None:
    graphs = [sampling_graph(JOB, "KSampler"), sampling_graph(JOB, "CPSampler", DEGREES["ring_2"])]
    for graph in graphs:
        graph["model"] = node("CheckpointLoaderSimple", ckpt_name=f"{name}.safetensors")
    native, got = (latent_of(server_of_files.client.run(graph)) for graph in graphs)
    check(got, native, name, "ring_2")


@pytest.mark.parametrize("weights", ["replicate", "shard", "offload"])
@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.sweep(one_in=3)
def test_a_scheduled_lora_is_merged_into_what_ksampler_merges_it_into(
    server_of_files: Server, name: str, weights: str
) -> None:
    """And leaves nothing behind."""

    def sampled(graph: Graph) -> Tensor:
        graph["model"]["inputs"]["unet_name"] = file_of(name)
        return latent_of(server_of_files.client.run(graph))

    parallel = replace(DEGREES["ring_2"], weights=weights)
    before = sampled(sampling_graph(JOB, "CPSampler", parallel))
    check(sampled(hooked(parallel)), sampled(hooked(None)), name, "ring_2")
    assert torch.equal(sampled(sampling_graph(JOB, "CPSampler", parallel)), before)


def check(got: Tensor, want: Tensor, name: str, degrees: str) -> None:
    print(f"APART {name} {degrees} {apart(got, want):.1e}")
    assert apart(got, want) <= (DEGREES_AND_BARS[degrees] if degrees == "1_worker" else ROUNDED.get(name, 1e-5))
