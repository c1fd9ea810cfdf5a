"""ComfyUI with a second machine, which here is a second address of this one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from parallel_runtime.errors import WorkerStartError
from parallel_runtime.group.worker_group import WorkerGroup
from parallel_runtime.specs import ComfySetup, Placement

from ..machines.guest import Guest, joining
from ..machines.network import TOKEN
from .client import Interrupted, NodeError
from .comfy import ComfyInstall
from .graphs import Job, Parallel, longer, sampling_graph
from .latents import apart, latent_of
from .processes import wait_until_none
from .server import LEASH_SECONDS, Server, free_port, running_server

FLUX = Job(family="flux_dev", cfg=2.0, size=(9, 31), prompt_tokens=(7, 20))
LONG = longer(FLUX, steps=2000)
ENDPOINT = f"127.0.0.1:{free_port()}"
TWO = Parallel(ring_degree=1, ulysses_degree=2, nnodes=2, rdzv_endpoint=ENDPOINT)


@pytest.fixture(scope="module")
def host(comfy: ComfyInstall) -> Iterator[Server]:
    with running_server(comfy, env={"CP_CLUSTER_TOKEN": TOKEN}) as server:
        yield server


@pytest.fixture(scope="module")
def guest(comfy: ComfyInstall, host: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guest]:
    with joining(tmp_path_factory.mktemp("guest"), endpoint=ENDPOINT, python=comfy.python) as command:
        yield command


def test_without_a_token_the_node_says_what_to_do_and_warm_workers_stay(server: Server) -> None:
    server.client.run(sampling_graph(FLUX, "CPSampler", replace(TWO, nnodes=1)))
    before = server.workers()
    with pytest.raises(NodeError, match=r"token of at least 16 characters, found none; .* CP_CLUSTER_TOKEN_FILE"):
        server.client.run(sampling_graph(FLUX, "CPSampler", TWO))
    assert server.workers() == before


@pytest.mark.sweep
def test_two_machines_sample_what_ksampler_samples(host: Server, guest: Guest) -> None:
    want = latent_of(host.client.run(sampling_graph(FLUX, "KSampler")))
    got = latent_of(host.client.run(sampling_graph(FLUX, "CPSampler", TWO)))
    assert apart(got, want) <= 1e-4
    assert list(guest.workers()) == [1]
    assert list(host.workers()) == [0]


@pytest.mark.sweep
def test_a_dead_rank_of_the_other_machine_is_an_error_of_the_node_and_the_next_run_works(
    host: Server, guest: Guest
) -> None:
    since = host.client.now()
    prompt = host.client.queue(sampling_graph(LONG, "CPSampler", TWO))
    host.client.wait_for_step(3, since=since)
    killed_at = time.monotonic()
    guest.workers()[1].kill()
    with pytest.raises(NodeError, match=r"CPSampler.*rank 1 \(cpu\) on 127.0.0.1 was killed by SIGKILL"):
        host.client.finish(prompt, since=since, timeout=30)
    assert time.monotonic() - killed_at < 10
    since = host.client.now()
    prompt = host.client.queue(sampling_graph(LONG, "CPSampler", TWO))
    host.client.wait_for_step(3, since=since)
    host.client.interrupt(prompt)
    with pytest.raises(Interrupted):
        host.client.finish(prompt, since=since, timeout=10)
    assert list(guest.workers()) == [1]


@pytest.mark.sweep
def test_another_version_of_comfyui_is_an_error_that_names_both(comfy: ComfyInstall) -> None:
    setup = ComfySetup(root=str(comfy.root), flags=("--cpu",), version="0.0.1")
    with pytest.raises(
        WorkerStartError, match=rf"rank 0 \(cpu\) could not start: .*is 0\.0\.1 where .*\d in {comfy.root} on"
    ):
        WorkerGroup(Placement(devices=("cpu",)), setup)


@pytest.mark.sweep
def test_a_killed_comfyui_leaves_no_worker_on_the_other_machine(comfy: ComfyInstall, tmp_path: Path) -> None:
    endpoint = f"127.0.0.1:{free_port()}"
    with (
        running_server(comfy, env={"CP_CLUSTER_TOKEN": TOKEN}) as server,
        joining(tmp_path, endpoint=endpoint, python=comfy.python) as guest,
    ):
        since = server.client.now()
        server.client.queue(sampling_graph(LONG, "CPSampler", replace(TWO, rdzv_endpoint=endpoint)))
        server.client.wait_for_step(3, since=since)
        assert guest.workers()
        server.kill()
        assert wait_until_none(server.mark, LEASH_SECONDS) == []
        deadline = time.monotonic() + LEASH_SECONDS
        while guest.started() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not guest.started()
