"""How CP Sampler behaves beside its numbers: it keeps its model and its workers, and follows cancel and progress."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace

import pytest
import torch

from .cases import DEGREES
from .client import Interrupted, NodeError
from .graphs import Job, longer, sampling_graph
from .latents import apart, latent_of
from .models import other_weights_in
from .processes import maps
from .server import Server
from .test_kin import on_the_loader

RING_2 = DEGREES["ring_2"]
FLUX = Job(family="flux_dev", cfg=2.0)
LONG = longer(FLUX, steps=2000)


def test_another_seed_samples_again_without_loading_again(server: Server) -> None:
    another = replace(FLUX, seed=8)
    want = latent_of(server.client.run(sampling_graph(another, "KSampler")))
    first = latent_of(server.client.run(sampling_graph(FLUX, "CPSampler", RING_2)))
    workers = server.workers()
    with other_weights_in(server.base / "models" / "diffusion_models" / "flux_dev.safetensors"):
        second = latent_of(server.client.run(sampling_graph(another, "CPSampler", RING_2)))
    assert apart(second, first) > 0.1, "another seed is another picture"
    assert apart(second, want) <= 1e-4, "loaded again"
    assert server.workers() == workers


def test_a_file_that_was_replaced_before_the_first_run_is_refused(server: Server) -> None:
    """ComfyUI has the old weights in its cache, and would go on with them."""
    job = replace(FLUX, family="wan_t2v", seed=5)
    server.client.free()
    server.client.run(sampling_graph(FLUX, "KSampler"))  # ComfyUI frees memory after this prompt at the latest
    server.client.run(sampling_graph(job, "KSampler"))
    with (
        other_weights_in(server.base / "models" / "diffusion_models" / "wan_t2v.safetensors"),
        pytest.raises(NodeError, match=r"weights of this MODEL.* are not those of wan_t2v.safetensors"),
    ):
        server.client.run(sampling_graph(job, "CPSampler", RING_2))
    server.client.run(sampling_graph(job, "CPSampler", RING_2))


def test_two_models_in_turn_each_give_their_own_latent(server: Server) -> None:
    jobs = [FLUX, Job(family="wan_t2v", cfg=2.0), FLUX, Job(family="wan_t2v", cfg=2.0)]
    for asked in jobs:
        want = latent_of(server.client.run(sampling_graph(asked, "KSampler")))
        got = latent_of(server.client.run(sampling_graph(asked, "CPSampler", RING_2)))
        assert apart(got, want) <= 1e-4, asked.family


def test_one_prompt_may_sample_with_two_models(server: Server) -> None:
    """The second sampler of a graph refines the first one's latent with another model of the same shape."""
    schnell = replace(FLUX, family="flux_schnell", denoise=0.5)
    latents = []
    for sampler in ("KSampler", "CPSampler"):
        parallel = RING_2 if sampler == "CPSampler" else None
        graph = sampling_graph(FLUX, sampler, parallel)
        for name, node in sampling_graph(schnell, sampler, parallel).items():
            graph[f"then_{name}"] = node
            for socket, value in node["inputs"].items():
                if isinstance(value, list):
                    node["inputs"][socket] = [f"then_{value[0]}", value[1]]
        graph["then_sampler"]["inputs"]["latent_image"] = ["sampler", 0]
        graph["save"]["inputs"]["samples"] = ["then_sampler", 0]
        del graph["then_save"]
        latents.append(latent_of(server.client.run(graph)))
    assert apart(latents[1], latents[0]) <= 1e-4


@pytest.mark.parametrize("what", ["unload_models", "free_memory"])
def test_free_drops_the_model_at_once_and_the_next_run_gives_the_same_bits(server: Server, what: str) -> None:
    want = latent_of(server.client.run(sampling_graph(FLUX, "CPSampler", RING_2)))
    workers = server.workers()
    assert all(maps(worker.pid, "flux_dev.safetensors") for worker in workers.values())
    server.client.post("/free", **{what: True})
    asked_at = time.monotonic()
    while any(maps(worker.pid, "flux_dev.safetensors") for worker in workers.values()):
        assert time.monotonic() - asked_at < 10
        time.sleep(0.02)
    got = latent_of(server.client.run(sampling_graph(FLUX, "CPSampler", RING_2)))
    assert torch.equal(got, want)
    assert server.workers() == workers


@pytest.mark.parametrize("this_prompt", [True, False], ids=["this prompt", "whatever runs"])
def test_cancel_ends_the_run_at_once_and_keeps_the_workers_warm(server: Server, this_prompt: bool) -> None:
    fresh = latent_of(server.client.run(sampling_graph(FLUX, "CPSampler", RING_2)))
    workers = server.workers()
    since = server.client.now()
    prompt = server.client.queue(sampling_graph(LONG, "CPSampler", RING_2))
    server.client.wait_for_step(3, since=since)
    asked_at = time.monotonic()
    server.client.post("/interrupt", **({"prompt_id": prompt} if this_prompt else {}))
    with pytest.raises(Interrupted):
        server.client.finish(prompt, since=since, timeout=10)
    assert time.monotonic() - asked_at < 10
    again = latent_of(server.client.run(sampling_graph(FLUX, "CPSampler", RING_2)))
    assert torch.equal(again, fresh), "bit for bit"
    assert server.workers() == workers


@pytest.mark.sweep
def test_cancel_of_a_native_sampler_waits_for_no_worker_that_is_stopped(server: Server) -> None:
    since = server.client.now()
    prompt = server.client.queue(on_the_loader(sampling_graph(LONG, "KSampler"), LONG, RING_2))
    server.client.wait_for_step(3, since=since)
    os.kill(server.workers()[1].pid, signal.SIGSTOP)
    server.client.post("/interrupt")
    with pytest.raises(Interrupted):
        server.client.finish(prompt, since=since, timeout=30)


def test_clearing_the_queue_drops_what_waits_and_leaves_what_runs(server: Server) -> None:
    since = server.client.now()
    running = server.client.queue(sampling_graph(longer(FLUX, steps=15), "CPSampler", RING_2))
    waiting = server.client.queue(sampling_graph(FLUX, "CPSampler", RING_2))
    server.client.wait_for_step(1, since=since)
    server.client.post("/queue", clear=True)
    server.client.finish(running, since=since)
    assert not any(server.client.pending())
    assert waiting not in server.client.get("/history")


def test_progress_and_previews_move_with_every_step(server: Server) -> None:
    asked = longer(FLUX, steps=6)
    native = server.client.run(sampling_graph(asked, "KSampler"), preview_method="latent2rgb")
    ours = server.client.run(sampling_graph(asked, "CPSampler", RING_2), preview_method="latent2rgb")
    assert ours.progress == native.progress == [1, 2, 3, 4, 5, 6]
    assert len(ours.previews) == len(native.previews) == 6
    assert all(image.startswith(b"\xff\xd8") for image in ours.previews), "JPEG, as KSampler sends"


@pytest.mark.sweep
def test_without_previews_progress_still_moves_while_sampling(server: Server) -> None:
    run = server.client.run(sampling_graph(longer(FLUX, steps=30), "CPSampler", RING_2))
    assert run.progress == sorted(run.progress)
    assert len(run.progress) >= 5, "ComfyUI itself sends at most ten a second"
    assert run.progress[-1] == 30
