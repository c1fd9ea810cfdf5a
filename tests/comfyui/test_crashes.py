"""A worker's death is an error of its node and no more."""

from __future__ import annotations

import time

import pytest

from .cases import DEGREES
from .client import NodeError
from .graphs import Job, longer, sampling_graph
from .latents import apart, latent_of
from .server import Server

FLUX = Job(family="flux_dev", cfg=2.0)
LONG = longer(FLUX, steps=2000)
RING_2 = DEGREES["ring_2"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_fails_its_run_at_once_and_the_next_run_works(server: Server, rank: int) -> None:
    since = server.client.now()
    prompt = server.client.queue(sampling_graph(LONG, "CPSampler", RING_2))
    server.client.wait_for_step(3, since=since)
    before = server.workers()
    killed_at = time.monotonic()
    before[rank].kill()
    with pytest.raises(NodeError, match=r"(?is)CPSampler.*(rank|worker).*(SIGKILL|killed|signal|died|gone)"):
        server.client.finish(prompt, since=since, timeout=30)
    assert time.monotonic() - killed_at < 2
    want = latent_of(server.client.run(sampling_graph(FLUX, "KSampler")))
    got = latent_of(server.client.run(sampling_graph(FLUX, "CPSampler", RING_2)))
    assert apart(got, want) <= 1e-4
    assert not {process.pid for process in before.values()} & {process.pid for process in server.children()}


def test_a_worker_killed_while_idle_is_replaced(server: Server) -> None:
    want = latent_of(server.client.run(sampling_graph(FLUX, "CPSampler", RING_2)))
    server.workers()[1].kill()
    time.sleep(1)
    got = latent_of(server.client.run(sampling_graph(FLUX, "CPSampler", RING_2)))
    assert apart(got, want) <= 1e-4
