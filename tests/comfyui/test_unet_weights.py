"""A UNet whose weights are in parts on all workers, or in main memory: the same bits as with all of them on each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from .cases import DEGREES
from .client import Graph
from .graphs import Parallel
from .latents import latent_of
from .nodes_benches import benches, write_benches
from .nodes_graphs import Trial
from .server import Server
from .test_weights import MODES, kept_weights

PLACED = {"ring 2": DEGREES["ring_2"], "Ulysses 2": DEGREES["ulysses_2"], "prompts": Parallel(cfg_degree=2)}
NETWORKS = {  # a node by which its prompts have what it asks for
    "unet": "LoraLoaderModelOnly",
    "unet_refiner": "CLIPTextEncodeSDXLRefiner",
    "unet_svd": "SVD_img2vid_Conditioning",
}


@pytest.fixture(scope="module")
def unets(shared_server: Server) -> Server:
    write_benches(shared_server, set(NETWORKS))
    return shared_server


@pytest.fixture(scope="module")
def replicated(unets: Server) -> Callable[..., Tensor]:
    """The latent with all weights on every worker, sampled once."""
    return functools.cache(lambda *case: latent_of(unets.client.run(picture(unets, *case, "replicate"))))


def picture(server: Server, network: str, division: str, latent: str, mode: str) -> Graph:
    parallel = replace(PLACED[division], weights=mode)
    trial = Trial(node=NETWORKS[network], bench=replace(benches()[network], latent=latent))
    return trial.graph(server.client.get("/object_info"), parallel)


@pytest.mark.sweep(one_in=6)
@pytest.mark.parametrize("latent", ["2,4,17,23", "2,4,2,2"])  # the second has too few rows, and is computed whole
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("division", ["ring 2", "Ulysses 2"])
@pytest.mark.parametrize("network", NETWORKS)
def test_the_bits_are_those_of_whole_weights(
    unets: Server, replicated: Callable[..., Tensor], network: str, division: str, mode: str, latent: str
) -> None:
    got = latent_of(unets.client.run(picture(unets, network, division, latent, mode)))
    assert torch.equal(got, replicated(network, division, latent))


def test_a_worker_holds_little_more_than_its_part(unets: Server) -> None:
    """What is outside of residual and transformer blocks is on each: convolutions between levels, projections."""
    shares = {}
    for mode in (*MODES, "replicate"):
        unets.client.run(picture(unets, "unet", "ring 2", "1,4,16,24", mode))
        shares[mode] = max(share for share, _ in kept_weights(unets))
    outside = shares["offload"]
    assert outside <= 0.2
    assert shares["shard"] <= outside + (1 - outside) / 2 + 0.03
    assert shares["replicate"] == 1


def test_prompts_apart_are_offloaded_too(unets: Server, replicated: Callable[..., Tensor]) -> None:
    case = "unet", "prompts", "1,4,16,24"
    assert torch.equal(latent_of(unets.client.run(picture(unets, *case, "offload"))), replicated(*case))


def test_auto_divides_rows_where_weights_are_to_be_in_parts(unets: Server) -> None:
    """A prompt on a worker of its own would have nobody to share them with."""
    graph = picture(unets, "unet", "prompts", "1,4,16,24", "shard")
    graph["config"]["inputs"] |= {"cfg_degree": 0, "devices": "cpu,cpu"}
    unets.client.run(graph)
    degrees = unets.client.get("/cp/status")["degrees"]
    assert degrees["ring_degree"] * degrees["ulysses_degree"] == 2
    assert max(share for share, _ in kept_weights(unets)) < 0.8
