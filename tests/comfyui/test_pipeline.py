"""CP Sampler in the stages of a pipeline gives KSampler's latent: each worker with its own blocks, of any format."""

from __future__ import annotations

import pytest

from .cases import FAMILIES, VARIATIONS, job
from .graphs import Parallel, sampling_graph
from .latents import apart, latent_of
from .server import Server

TWO, THREE = Parallel(pipeline_degree=2), Parallel(pipeline_degree=3)
FOUR = [Parallel(pipeline_degree=2, cfg_degree=2), Parallel(pipeline_degree=2, ulysses_degree=2),
        Parallel(pipeline_degree=2, data_degree=2)]  # fmt: skip
EXACT, BAR = 1e-5, 1e-4  # of the latent's standard deviation: rows are evaluated one by one; where tokens are cut


@pytest.mark.sweep(one_in=12)
@pytest.mark.parametrize("variation", list(VARIATIONS))
@pytest.mark.parametrize("family", FAMILIES)
def test_the_latent_is_ksamplers(server: Server, family: str, variation: str) -> None:
    asked = job(family, variation)
    want = latent_of(server.client.run(sampling_graph(asked, "KSampler")))
    got = latent_of(server.client.run(sampling_graph(asked, "CPSampler", TWO)))
    assert apart(got, want) <= EXACT


@pytest.mark.sweep
@pytest.mark.parametrize("parallel", [THREE, *FOUR], ids=["3", "2 x cfg 2", "2 x ulysses 2", "2 x data 2"])
def test_together_with_others(server: Server, parallel: Parallel) -> None:
    asked = job("flux_dev", "odd_size_guided")
    want = latent_of(server.client.run(sampling_graph(asked, "KSampler")))
    got = latent_of(server.client.run(sampling_graph(asked, "CPSampler", parallel)))
    assert apart(got, want) <= BAR
