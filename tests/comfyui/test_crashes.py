"""A worker's death is an error of its node and no more."""

from __future__ import annotations

import time

import pytest

from ..groups import faulty
from .cases import DEGREES
from .client import NodeError
from .comfy import ComfyInstall
from .graphs import Job, longer, sampling_graph
from .latents import apart, latent_of
from .server import Server, running_server
from .test_kin import on_the_loader

FLUX = Job(family="flux_dev", cfg=2.0)
LONG = longer(FLUX, steps=2000)
RING_2 = DEGREES["ring_2"]


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_fails_its_run_at_once_and_the_next_run_works(server: Server, rank: int) -> None:
    since = server.client.now()
    prompt = server.client.queue(sampling_graph(LONG, "CPSampler", RING_2))
    server.client.wait_for_step(3, since=since)
    before = server.workers()
    killed_at = time.monotonic()
    before[rank].kill()
    says = r"(?is)CPSampler.*(rank|worker).*(SIGKILL|killed|signal|died|gone).*the next run starts fresh workers"
    with pytest.raises(NodeError, match=says):
        server.client.finish(prompt, since=since, timeout=30)
    assert time.monotonic() - killed_at < 10
    want = latent_of(server.client.run(sampling_graph(FLUX, "KSampler")))
    got = latent_of(server.client.run(sampling_graph(FLUX, "CPSampler", RING_2)))
    assert apart(got, want) <= 1e-4
    assert not {process.pid for process in before.values()} & {process.pid for process in server.children()}


@pytest.mark.sweep  # test_routes has it too
def test_a_worker_killed_while_idle_is_replaced(server: Server) -> None:
    want = latent_of(server.client.run(sampling_graph(FLUX, "CPSampler", RING_2)))
    server.workers()[1].kill()
    time.sleep(1)
    got = latent_of(server.client.run(sampling_graph(FLUX, "CPSampler", RING_2)))
    assert apart(got, want) <= 1e-4


@pytest.mark.sweep
@pytest.mark.parametrize("native", [False, True], ids=["CP Sampler", "KSampler on CP Load Diffusion Model"])
def test_in_debug_mode_a_rank_that_computes_something_else_is_found(comfy: ComfyInstall, native: bool) -> None:
    deviates = {"CP_DEBUG": "1", **faulty("1 evaluation deviate")}
    native_graph = on_the_loader(sampling_graph(FLUX, "KSampler"), FLUX, RING_2)
    graph = native_graph if native else sampling_graph(FLUX, "CPSampler", RING_2)
    with (
        running_server(comfy, env=deviates) as server,
        pytest.raises(NodeError, match=r"after (step 3 of 4|an evaluation).* of rank 1 differs from that of rank 0"),
    ):
        server.client.run(graph)
