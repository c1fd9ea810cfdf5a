"""Every network that has a plan, from its file, with what its users give it, at odd sizes: KSampler's latent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from .cases import DEGREES
from .graphs import Parallel
from .latents import apart, latent_of
from .networks import NETWORKS, picture
from .server import Server

BARS = {
    "1_worker": 2e-6,
    "ring_3": 1e-5,
    "ring_2_x_ulysses_2": 1e-5,
    "pipeline_2": 1e-5,
}  # of the latent's standard deviation


@pytest.mark.sweep(one_in=17)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("degrees", BARS)
def test_it_is_sampled_as_ksampler_does(
    server: Server, native_network: Callable[[str], Tensor], degrees: str, name: str
) -> None:
    got = latent_of(server.client.run(picture(name, DEGREES[degrees])))
    assert apart(got, native_network(name)) <= BARS[degrees]


@pytest.mark.parametrize("degrees", [Parallel(cfg_degree=2), Parallel(data_degree=2)], ids=["prompts", "images"])
def test_who_trades_the_halves_of_its_batch_has_all_of_it(
    server: Server, native_network: Callable[[str], Tensor], degrees: Parallel
) -> None:
    got = latent_of(server.client.run(picture("hunyuan_3d_21", degrees)))
    assert apart(got, native_network("hunyuan_3d_21")) <= 1e-5


@pytest.mark.parametrize("name", ["qwen_edit", "ltx2"])
def test_in_the_stages_of_a_pipeline(server: Server, native_network: Callable[[str], Tensor], name: str) -> None:
    """With a reference, and with two streams of tokens: video and audio."""
    got = latent_of(server.client.run(picture(name, DEGREES["pipeline_2"])))
    assert apart(got, native_network(name)) <= BARS["pipeline_2"]
