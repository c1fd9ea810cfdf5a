"""A network that no plan knows, here one of convolutions: prompts and the images of a batch are shared out."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from .cases import DEGREES
from .client import Graph, NodeError
from .comfy import ComfyInstall
from .graphs import Job, Parallel, sampling_graph
from .latents import apart, latent_of
from .server import Server
from .test_kin import node
from .vae_graphs import BAR as VAE_BAR
from .vae_graphs import both, decoding

JOB = Job(family="flux_dev", cfg=4.0, batch=3, sampler="dpmpp_2m")
TEXT = '{"tokens": %d, "dim": 32}'
BAR = 1e-5  # of the latent's standard deviation


@pytest.fixture(scope="module")
def unet_server(comfy: ComfyInstall, shared_server: Server) -> Server:
    target = shared_server.base / "models" / "diffusion_models" / "unet.safetensors"
    script = Path(__file__).with_name("write_unet.py")
    subprocess.run([comfy.python, script, comfy.root, target], check=True, capture_output=True)
    return shared_server


def picture(parallel: Parallel | None, *, loader: str = "UNETLoader", size: str = "3,4,16,24") -> Graph:
    graph = sampling_graph(JOB, "CPSampler" if parallel else "KSampler", parallel)
    graph["model"] = node(loader, unet_name="unet.safetensors")
    if loader == "UNETLoader":
        graph["model"]["inputs"]["weight_dtype"] = "default"
    graph["latent"]["inputs"] |= {"shape": size}
    for name, tokens in (("positive", 7), ("negative", 12)):
        graph[name]["inputs"]["spec"] = TEXT % tokens
    return graph


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(Parallel(cfg_degree=2), id="prompts"),
        pytest.param(Parallel(data_degree=2, cfg_degree=1), id="images"),
        pytest.param(Parallel(data_degree=2, cfg_degree=2), id="both", marks=pytest.mark.sweep),
    ],
)
def test_it_is_sampled_as_ksampler_does(unet_server: Server, parallel: Parallel) -> None:
    want = latent_of(unet_server.client.run(picture(None)))
    assert apart(latent_of(unet_server.client.run(picture(parallel))), want) <= BAR
    odd = latent_of(unet_server.client.run(picture(None, size="1,4,18,26")))
    assert apart(latent_of(unet_server.client.run(picture(parallel, size="1,4,18,26"))), odd) <= BAR


def test_one_config_with_shares_serves_it_and_a_vae_on_one_device_more(unet_server: Server, vaes: Server) -> None:
    """Two prompts are on two of three workers, and a VAE's rows on all of them."""
    parallel = Parallel(ring_degree=0, ulysses_degree=0, devices="cpu,cpu,cpu", shares="3,2,1")
    want = latent_of(unet_server.client.run(picture(None)))
    assert apart(latent_of(unet_server.client.run(picture(parallel))), want) <= BAR
    assert len(unet_server.workers()) == 2
    assert both(vaes, decoding, "taef1", "1,16,9,14", parallel) <= VAE_BAR
    assert len(unet_server.workers()) == 3


def test_a_native_sampler_takes_it_from_the_workers_which_share_out_both_prompts(unet_server: Server) -> None:
    """ComfyUI asks for both in one batch, whose rows have to do for prompts."""
    graph = picture(None, loader="CPLoadDiffusionModel")
    graph["config"] = node("CPParallelConfig", **vars(Parallel(devices="cpu,cpu")))
    graph["model"]["inputs"]["cp_config"] = ["config", 0]
    want = latent_of(unet_server.client.run(picture(None)))
    assert apart(latent_of(unet_server.client.run(graph)), want) <= BAR
    degrees = unet_server.client.get("/cp/status")["degrees"]
    assert (degrees["cfg_degree"], degrees["data_degree"]) == (1, 2)


@pytest.mark.parametrize("degrees", ["ring_2", "ulysses_2"])
def test_cutting_its_sequence_is_refused_with_the_way_out(unet_server: Server, degrees: str) -> None:
    with pytest.raises(NodeError, match=r"UNetModel cannot be cut by sequence.*set both to 0; cfg_degree 2"):
        unet_server.client.run(picture(replace(DEGREES[degrees], devices="")))


def test_patches_that_share_a_variable_share_it_in_the_workers(unet_server: Server) -> None:
    """HyperTile's second patch undoes what the first says that it did. It needs all tokens, and is named."""

    def tiled(parallel: Parallel | None) -> Graph:
        graph = picture(parallel, size="1,4,64,64")
        tiles = {"tile_size": 64, "swap_size": 2, "max_depth": 0, "scale_depth": False}
        graph["tiled"] = node("HyperTile", model=["model", 0], **tiles)
        graph["sampler"]["inputs"]["model"] = ["tiled", 0]
        return graph

    want = latent_of(unet_server.client.run(tiled(None)))
    plain = latent_of(unet_server.client.run(picture(None, size="1,4,64,64")))
    assert apart(plain, want) > 1e-3, "it does something"
    assert apart(latent_of(unet_server.client.run(tiled(Parallel(cfg_degree=1, data_degree=2)))), want) <= BAR
    with pytest.raises(NodeError, match=r"UNetModel with attn1_patch of HyperTile, attn1_output_patch of HyperTile"):
        unet_server.client.run(tiled(DEGREES["ulysses_2"]))
