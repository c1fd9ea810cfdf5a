"""Every network that has a plan, from its file, with what its users give it, at odd sizes: KSampler's latent."""

from __future__ import annotations

import functools
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from .cases import DEGREES
from .client import Graph
from .comfy import ComfyInstall
from .graphs import Job, Parallel, sampling_graph
from .latents import apart, latent_of
from .networks import NETWORKS
from .server import Server

BARS = {
    "1_worker": 1e-6,
    "ring_3": 1e-5,
    "ring_2_x_ulysses_2": 1e-5,
    "pipeline_2": 1e-5,
}  # of the latent's standard deviation
JOB = Job(family="flux_dev", cfg=2.0, steps=3, latent_seed=4)


@pytest.fixture(scope="module")
def server_of_networks(comfy: ComfyInstall, shared_server: Server) -> Server:
    """The session's, with a file of each."""
    folder = shared_server.base / "models" / "diffusion_models" / "networks"
    folder.mkdir()
    command = [comfy.python, "-m", "tests.comfyui.write_networks", folder]
    project, environment = Path(__file__).parents[2], os.environ | {"COMFYUI_PATH": str(comfy.root)}
    subprocess.run(command, check=True, capture_output=True, cwd=project, env=environment)
    return shared_server


def picture(name: str, parallel: Parallel | None = None) -> Graph:
    network = NETWORKS[name]
    graph = sampling_graph(JOB, "CPSampler" if parallel else "KSampler", parallel)
    graph["model"]["inputs"]["unet_name"] = f"networks/{name}.safetensors"
    for text, tokens in ("positive", network.tokens), ("negative", max(network.tokens, 12)):
        graph[text]["inputs"]["spec"] = json.dumps(network.spec(tokens))
    graph["latent"]["inputs"]["shape"] = network.shape
    return graph


@pytest.fixture(scope="module")
def native(server_of_networks: Server) -> Callable[[str], Tensor]:
    """KSampler's latent, sampled once."""
    return functools.cache(lambda name: latent_of(server_of_networks.client.run(picture(name))))


@pytest.mark.sweep(one_in=17)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("degrees", BARS)
def test_it_is_sampled_as_ksampler_does(
    server: Server, native: Callable[[str], Tensor], degrees: str, name: str
) -> None:
    got = latent_of(server.client.run(picture(name, DEGREES[degrees])))
    assert apart(got, native(name)) <= BARS[degrees]


@pytest.mark.parametrize("name", ["qwen_edit", "ltx2"])
def test_in_the_stages_of_a_pipeline(server: Server, native: Callable[[str], Tensor], name: str) -> None:
    """With a reference, and with two streams of tokens: video and audio."""
    assert apart(latent_of(server.client.run(picture(name, DEGREES["pipeline_2"]))), native(name)) <= BARS["pipeline_2"]
