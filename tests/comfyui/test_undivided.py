"""A UNet: prompts and the images of a batch are shared out, or the rows of one picture."""

from __future__ import annotations

import pytest

from .cases import DEGREES
from .client import Graph
from .graphs import Job, Parallel, sampling_graph
from .latents import apart, latent_of
from .server import Server
from .test_kin import node
from .vae_graphs import BAR as VAE_BAR
from .vae_graphs import both, decoding

JOB = Job(family="flux_dev", cfg=4.0, batch=3, sampler="dpmpp_2m")
TEXT = '{"tokens": %d, "dim": 32}'
BAR = 1e-5  # of the latent's standard deviation
BAR_BY_ROWS = 2e-5
LANES = [
    pytest.param(Parallel(cfg_degree=2), id="prompts"),
    pytest.param(Parallel(data_degree=2, cfg_degree=1), id="images"),
    pytest.param(Parallel(data_degree=2, cfg_degree=2), id="both", marks=pytest.mark.sweep),
    pytest.param(DEGREES["ring_2"], id="rows"),
]


@pytest.fixture(scope="module")
def unet_server(shared_server: Server) -> Server:
    shared_server.write_tiny()
    return shared_server


def picture(parallel: Parallel | None, *, loader: str = "UNETLoader", size: str = "3,4,16,24") -> Graph:
    graph = sampling_graph(JOB, "CPSampler" if parallel else "KSampler", parallel)
    graph["model"] = node(loader, unet_name="unets/sd15_calm.safetensors")
    if loader == "UNETLoader":
        graph["model"]["inputs"]["weight_dtype"] = "default"
    graph["latent"]["inputs"] |= {"shape": size}
    for name, tokens in (("positive", 7), ("negative", 12)):
        graph[name]["inputs"]["spec"] = TEXT % tokens
    return graph


@pytest.mark.parametrize("parallel", LANES)
def test_it_is_sampled_as_ksampler_does(unet_server: Server, parallel: Parallel) -> None:
    want = latent_of(unet_server.client.run(picture(None)))
    assert apart(latent_of(unet_server.client.run(picture(parallel))), want) <= BAR
    odd = latent_of(unet_server.client.run(picture(None, size="1,4,18,26")))
    assert apart(latent_of(unet_server.client.run(picture(parallel, size="1,4,18,26"))), odd) <= BAR


@pytest.mark.sweep
def test_one_config_with_shares_serves_a_unet_and_a_vae(unet_server: Server, vaes: Server) -> None:
    """Auto divides a UNet as is fastest here, and the rows of a VAE are on all three workers."""
    parallel = Parallel(ring_degree=0, ulysses_degree=0, devices="cpu,cpu,cpu", shares="3,2,1")
    want = latent_of(unet_server.client.run(picture(None)))
    assert apart(latent_of(unet_server.client.run(picture(parallel))), want) <= BAR
    assert both(vaes, decoding, "taef1", "1,16,9,14", parallel) <= VAE_BAR
    assert len(unet_server.workers()) == 3


@pytest.mark.sweep
def test_a_native_sampler_samples_a_model_of_our_loader_on_the_workers(unet_server: Server) -> None:
    graph = picture(None, loader="CPLoadDiffusionModel")
    graph["config"] = node("CPParallelConfig", **vars(Parallel(devices="cpu,cpu")))
    graph["model"]["inputs"]["cp_config"] = ["config", 0]
    want = latent_of(unet_server.client.run(picture(None)))
    assert apart(latent_of(unet_server.client.run(graph)), want) <= BAR
    assert len(unet_server.workers()) == 2


@pytest.mark.parametrize(
    "degrees", ["ring_2", "ulysses_2", pytest.param("ring_2_x_ulysses_2", marks=pytest.mark.sweep)]
)
@pytest.mark.sweep(one_in=3)
def test_its_rows_are_shared_out_where_somebody_asks_for_it(unet_server: Server, degrees: str) -> None:
    for size in ("3,4,16,24", "1,4,27,18"):
        want = latent_of(unet_server.client.run(picture(None, size=size)))
        assert apart(latent_of(unet_server.client.run(picture(DEGREES[degrees], size=size))), want) <= BAR_BY_ROWS
    assert unet_server.client.get("/cp/status")["degrees"]["ring_degree"] == DEGREES[degrees].ring_degree


def test_a_latent_of_too_few_rows_is_sampled_on_every_worker(unet_server: Server) -> None:
    want = latent_of(unet_server.client.run(picture(None, size="2,4,2,2")))
    assert apart(latent_of(unet_server.client.run(picture(DEGREES["ring_2"], size="2,4,2,2"))), want) <= BAR


@pytest.mark.sweep
def test_patches_that_share_a_variable_share_it_in_the_workers(unet_server: Server) -> None:
    """HyperTile's second patch undoes what the first says that it did. Both see all tokens."""

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
    assert apart(latent_of(unet_server.client.run(tiled(DEGREES["ulysses_2"]))), want) <= BAR_BY_ROWS


@pytest.mark.parametrize("parallel", LANES)
@pytest.mark.sweep(one_in=2)
def test_guidance_by_what_a_patch_has_seen_sees_every_prompt_and_image(unet_server: Server, parallel: Parallel) -> None:
    """Self-Attention Guidance keeps the map of the negative prompt, for a function that all workers call."""
    want, plain = (latent_of(unet_server.client.run(graph)) for graph in (attentive(picture(None)), picture(None)))
    assert apart(plain, want) > 1e-3, "it does something"
    assert apart(latent_of(unet_server.client.run(attentive(picture(parallel)))), want) <= BAR


def test_such_a_patch_and_its_function_are_both_in_the_workers_for_a_native_sampler(unet_server: Server) -> None:
    want = latent_of(unet_server.client.run(attentive(picture(None))))
    got = latent_of(unet_server.client.run(attentive(picture(None, loader="CPLoadDiffusionModel"))))
    assert apart(got, want) <= BAR


def attentive(graph: Graph) -> Graph:
    graph["attentive"] = node("SelfAttentionGuidance", model=["model", 0], scale=0.5, blur_sigma=2.0)
    graph["sampler"]["inputs"]["model"] = ["attentive", 0]
    return graph
