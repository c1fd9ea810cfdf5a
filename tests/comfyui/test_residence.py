"""How long workers keep a model, and when they start."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from .cases import DEGREES
from .graphs import Job, sampling_graph
from .latents import apart, latent_of
from .server import Server
from .test_kin import on_the_loader, wait_for

RING_2 = DEGREES["ring_2"]
FLUX = Job(family="flux_dev", cfg=2.0, size=(9, 14))
BAR = 1e-4


def loaded(server: Server) -> set[str]:
    """The models that the workers have."""
    return {weights["model"] for rank in server.client.get("/cp/status")["ranks"] for weights in rank["weights"]}


def test_two_models_in_turn_are_loaded_once_and_a_third_makes_room(server: Server) -> None:
    def run(family: str) -> tuple[bool, bool]:
        """Was it there already, and did another one go?"""
        job = replace(FLUX, family=family)
        was_loaded, since = f"{family}.safetensors" in loaded(server), server.log_size()
        ours = latent_of(server.client.run(sampling_graph(job, "CPSampler", RING_2)))
        log = server.log(since)
        assert apart(ours, latent_of(server.client.run(sampling_graph(job, "KSampler")))) <= BAR
        return was_loaded, "unloading the workers' model" in log

    for family in ("qwen_image", "flux_dev", "wan_t2v"):
        run(family)
    for family in ("flux_dev", "wan_t2v") * 2:
        assert run(family) == (True, False)
    assert run("qwen_image")[1]
    assert run("wan_t2v") == (True, False)
    assert run("flux_dev")[1], "the one that was used longest ago makes room"


@pytest.mark.parametrize("native", [False, True], ids=["CP Sampler", "KSampler on CP Load Diffusion Model"])
@pytest.mark.parametrize(("policy", "says"), [("unload", "unloading"), ("offload", "offloading"), ("keep", None)])
@pytest.mark.sweep(one_in=2)
def test_after_a_run_the_model_stays_or_goes_as_asked(
    server: Server, native: bool, policy: str, says: str | None
) -> None:
    parallel = replace(RING_2, after_sampling=policy)

    def run() -> torch.Tensor:
        graph = sampling_graph(FLUX, "KSampler" if native else "CPSampler", None if native else parallel)
        return latent_of(server.client.run(on_the_loader(graph, FLUX, parallel) if native else graph))

    server.client.run(sampling_graph(FLUX, "CPSampler", RING_2))
    since = server.log_size()
    first, second = run(), run()
    assert torch.equal(first, second)
    assert server.log(since).count("the workers' model") == (2 if says else 0)
    assert says is None or f"{says} the workers' model" in server.log(since)


def test_a_model_that_has_gone_takes_no_place(server: Server) -> None:
    def run(family: str, policy: str) -> str:
        since = server.log_size()
        parallel = replace(RING_2, after_sampling=policy)
        server.client.run(sampling_graph(replace(FLUX, family=family), "CPSampler", parallel))
        return server.log(since)

    for family in ("flux_dev", "wan_t2v"):
        run(family, "unload")
    run("flux_dev", "keep")
    run("wan_t2v", "unload")
    assert "unloading" not in run("qwen_image", "keep")
    assert loaded(server) == {"flux_dev.safetensors", "qwen_image.safetensors"}


@pytest.fixture
def deserted(server: Server) -> Server:
    """It has no workers, and nothing that could become one."""
    for process in server.workers().values():
        process.kill()
    wait_for(lambda: not server.children(), seconds=5)
    return server


def test_workers_start_while_text_is_still_encoded(deserted: Server, tmp_path: Path) -> None:
    server, encoded = deserted, tmp_path / "encoded"
    graph = sampling_graph(FLUX, "CPSampler", RING_2)
    waiting = {"conditioning": ["positive", 0], "seconds": 20.0, "file": str(encoded)}
    graph["slow"] = {"class_type": "CPTestWait", "inputs": waiting}
    graph["sampler"]["inputs"]["positive"] = ["slow", 0]
    since = server.client.now()
    started = time.monotonic()
    prompt = server.client.queue(graph)
    wait_for(lambda: len(server.workers()) == 2, seconds=15)
    assert time.monotonic() - started > 1, "what is refused at once needs no workers"
    encoded.touch()
    server.client.finish(prompt, since=since)


def test_a_prompt_that_never_runs_starts_no_workers(deserted: Server) -> None:
    """Not even while another one runs that needs none."""
    server = deserted
    slow = sampling_graph(FLUX, "KSampler")
    slow["slow"] = {"class_type": "CPTestWait", "inputs": {"conditioning": ["positive", 0], "seconds": 3.0}}
    slow["sampler"]["inputs"]["positive"] = ["slow", 0]
    since = server.client.now()
    prompt = server.client.queue(slow)
    invalid = sampling_graph(FLUX, "CPSampler", RING_2)
    del invalid["sampler"]["inputs"]["seed"]
    with pytest.raises(Exception, match="seed"):
        server.client.queue(invalid)
    server.client.finish(prompt, since=since)
    assert not server.children()


def test_a_prompt_that_is_refused_at_once_starts_no_workers(deserted: Server) -> None:
    with pytest.raises(Exception, match="ulysses_degree 1 needs 2 workers"):
        deserted.client.run(sampling_graph(FLUX, "CPSampler", replace(RING_2, devices="cpu")))
    time.sleep(2)
    assert not deserted.children()


def resident(server: Server) -> list[int]:
    """The bytes of weights that each rank has on its device."""
    ranks = server.client.get("/cp/status")["ranks"]
    return [sum(weights["resident"] for weights in rank["weights"]) for rank in ranks]


@pytest.mark.parametrize("weights", ["replicate", "shard", "offload"])
def test_a_run_after_a_text_encoder_took_some_memory_brings_back_what_went(server: Server, weights: str) -> None:
    """With one CPU as the device of all ranks each gives back its part."""
    parallel = replace(RING_2, weights=weights)
    least = 2 if weights == "replicate" else 8  # the shards of this small network are large
    server.client.run(sampling_graph(FLUX, "CPSampler", parallel))  # there are workers, and ComfyUI holds their model
    since = server.log_size()
    server.client.post("/free", unload_models=True)
    wait_for(lambda: "unloading the workers' model" in server.log(since) and not loaded(server), seconds=30)
    before = latent_of(server.client.run(sampling_graph(FLUX, "CPSampler", parallel)))
    full, since = resident(server), server.log_size()
    for share in (4, 3):
        assert server.client.post("/cp_test/take", bytes=sum(full) // share)["stays"]
        for size, whole in zip(resident(server), full, strict=True):
            assert whole // least <= size <= whole - whole // share
        assert torch.equal(latent_of(server.client.run(sampling_graph(FLUX, "CPSampler", parallel))), before)
        assert resident(server) == full
    log = server.log(since)
    assert log.count("the workers gave back") == 2
    assert "unloading the workers' model" not in log
