"""Workers that record all that they may, by tape: KSampler's latent all the same, whatever changes between the runs.

A tape gets wrong what a CUDA graph would get wrong. Older tests run with it too: CP_TEST_FAULT=tape.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ..groups import faulty, wait_until
from .cases import DEGREES, job
from .client import NodeError
from .comfy import DEVICE, ComfyInstall
from .graphs import Job, Parallel, sampling_graph, with_control_net
from .latents import apart, latent_of
from .server import Server, running_server
from .test_kin import on_the_loader
from .test_lora import lora, with_loras, write
from .test_model_patches import Node, with_nodes
from .vae_graphs import BAR as VAE_BAR
from .vae_graphs import TWO as TWO_BY_ROWS
from .vae_graphs import both, decoding

BAR = 1e-4  # of the latent's standard deviation, float32
TWO = DEGREES["ulysses_2"]
FLUX = Job(family="flux_dev", cfg=2.0, steps=6)
WAN = replace(FLUX, family="wan_t2v")

TAPED: list[Any] = [("flux_dev", "ring_2"), ("wan_t2v", "ulysses_2"), ("qwen_image", "ring_2"), ("ltxv", "ulysses_2")]
TAPED += [
    pytest.param(family, degrees, marks=pytest.mark.sweep)
    for family, degrees in itertools.product(["flux_dev", "wan_t2v", "qwen_image", "ltxv"], DEGREES)
    if (family, degrees) not in TAPED and degrees not in ("ring_3", "pipeline_2")
]


@pytest.fixture(scope="module")
def server(comfy: ComfyInstall) -> Iterator[Server]:
    tapes = {"CP_TEST_FAULT": faulty("tape")["CP_TEST_FAULT"]} if DEVICE == "cpu" else {}
    with running_server(comfy, env=tapes) as server:
        yield server


def graphs(server: Server) -> list[dict[str, Any]]:
    """What each worker says of its recordings."""
    return [rank["graphs"] for rank in server.client.get("/cp/status")["ranks"]]


def replays(server: Server) -> int:
    """Of the worker that replayed least."""
    return min(counts["replays"] for counts in graphs(server))


def free(server: Server) -> None:
    server.client.free()
    wait_until(lambda: all((counts["keys"], counts["bytes"]) == (0, 0) for counts in graphs(server)), 20)


def native(server: Server, asked: Job) -> Tensor:
    return latent_of(server.client.run(sampling_graph(asked, "KSampler")))


def ours(server: Server, asked: Job, parallel: Parallel | None = TWO) -> Tensor:
    if DEVICE != "cpu" and parallel is not None and parallel.cuda_graphs == "auto":
        parallel = replace(parallel, cuda_graphs="on")  # auto records only where the CPU is what is slow
    return latent_of(server.client.run(sampling_graph(asked, "CPSampler", parallel)))


def is_the_same(server: Server, asked: Job, parallel: Parallel | None = TWO) -> None:
    assert apart(ours(server, asked, parallel), native(server, asked)) <= BAR


@pytest.mark.parametrize(("family", "degrees"), TAPED)
@pytest.mark.sweep(one_in=2)
def test_a_run_is_replayed_and_is_ksamplers(server: Server, family: str, degrees: str) -> None:
    is_the_same(server, replace(FLUX, family=family), DEGREES[degrees])
    once = replays(server)
    is_the_same(server, replace(FLUX, family=family, seed=8), DEGREES[degrees])
    assert replays(server) >= once + FLUX.steps, "the second run replays from its first step on"


@pytest.mark.parametrize(
    "variation",
    ["batch_of_two", "odd_size_guided", "unequal_prompts", "inpainting", "two_prompts_one_area", "sde", "masked_text"],
)
@pytest.mark.sweep(one_in=3)
def test_what_workflows_do(server: Server, variation: str) -> None:
    is_the_same(server, replace(job("flux_dev", variation), steps=6))
    before = replays(server)
    is_the_same(server, replace(job("flux_dev", variation), steps=6, seed=11))
    assert replays(server) > before


def test_prompts_and_images_in_groups(server: Server) -> None:
    for parallel in (Parallel(cfg_degree=2, devices="cpu,cpu"), Parallel(data_degree=2, cfg_degree=1)):
        is_the_same(server, replace(FLUX, batch=2), parallel)
        assert replays(server) > 0


def test_a_lora_changes_what_is_replayed(server: Server) -> None:
    names = [write(server, f"recorded_{rank}", lora(server, "flux_dev", rank)) for rank in (4, 8)]
    stacks: list[list[tuple[str, float]]] = [[], [(names[0], 1.0)], [(names[1], -0.6)], [(names[0], 0.5)], []]
    seen = []
    for stack in stacks:
        for _ in range(2):  # of which the second replays from its first step on
            latents = [
                latent_of(server.client.run(with_loras(sampling_graph(FLUX, kind, parallel), stack)))
                for kind, parallel in (("KSampler", None), ("CPSampler", TWO))
            ]
            assert apart(latents[1], latents[0]) <= BAR
        seen.append(latents[1])
    assert all(apart(a, b) > 0.01 for a, b in itertools.pairwise(seen)), "each stack has a picture of its own"


def test_values_that_a_node_sets_on_the_network_change_what_is_replayed(server: Server) -> None:
    seen = []
    for nodes in ((), (Node("CPTestForeignWrapper", {"kind": "no_guidance"}),)) * 2:
        want, *got = (
            latent_of(server.client.run(with_nodes(sampling_graph(FLUX, kind, parallel), nodes)))
            for kind, parallel in (("KSampler", None), ("CPSampler", TWO), ("CPSampler", TWO))
        )
        assert max(apart(latent, want) for latent in got) <= BAR
        seen.append(got[-1])
    assert all(apart(a, b) > 0.01 for a, b in itertools.pairwise(seen)), "each has a picture of its own"


MEANWHILE = (Node("CPTestTampered", {"kind": "torch's method at first"}),)
STAGES = DEGREES["pipeline_2"]
OTHERS = {
    "stages": STAGES,
    "patches": replace(STAGES, patches=2),
    "shares": replace(TWO, shares="3,2"),
    "shard": replace(TWO, weights="shard"),
    "offload": replace(TWO, weights="offload"),
}


@pytest.mark.parametrize("parallel", OTHERS.values(), ids=OTHERS)
@pytest.mark.sweep(one_in=3)
def test_where_recording_is_only_asked_for_nothing_changes(server: Server, parallel: Parallel) -> None:
    asked = replace(FLUX, size=(9, 14), steps=8)
    want = ours(server, asked, replace(parallel, cuda_graphs="off"))
    assert torch.equal(ours(server, asked, parallel), want)
    if parallel.patches == 1:
        assert apart(want, native(server, asked)) <= BAR


@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"], ids=["one", "two"])
def test_code_that_a_pack_replaces_in_some_steps_is_neither_recorded_nor_replayed(server: Server, devices: str) -> None:
    """Two workers sample again with the network undivided."""
    asked = replace(FLUX, steps=12)
    want, *got = (
        latent_of(server.client.run(with_nodes(sampling_graph(asked, kind, parallel), MEANWHILE)))
        for kind, parallel in (("KSampler", None), *[("CPSampler", Parallel(devices=devices, dtype="auto"))] * 2)
    )
    assert apart(native(server, asked), want) > 0.01
    assert max(apart(latent, want) for latent in got) <= BAR
    assert replays(server) > 0, "the other steps are"


def test_a_vae_beside_recordings_gives_its_own_pictures(server: Server) -> None:
    server.write_tiny("vaes")
    is_the_same(server, FLUX)
    for _ in range(3):
        assert both(server, decoding, "taef1", "1,16,9,14", TWO_BY_ROWS) <= VAE_BAR
    before = replays(server)
    is_the_same(server, FLUX)
    assert replays(server) > before


def test_two_models_in_turn_keep_their_recordings(server: Server) -> None:
    for asked in (FLUX, WAN, FLUX, WAN):
        is_the_same(server, asked)
    before = replays(server)
    for asked in (FLUX, WAN):
        is_the_same(server, asked)
    assert replays(server) >= before + 2 * FLUX.steps


def test_a_control_net_is_recorded(server: Server) -> None:
    want, got = (
        latent_of(server.client.run(with_control_net(sampling_graph(FLUX, kind, parallel))))
        for kind, parallel in (("KSampler", None), ("CPSampler", TWO))
    )
    assert apart(got, want) <= BAR


def test_evaluations_for_a_native_sampler_are_recorded_but_those_of_stages(server: Server) -> None:
    want, before = native(server, FLUX), replays(server)
    for parallel in (TWO, STAGES):
        graph = on_the_loader(sampling_graph(FLUX, "KSampler"), FLUX, parallel)
        assert apart(latent_of(server.client.run(graph)), want) <= BAR
        assert (replays(server) > before) == (parallel is TWO)
        before = replays(server)


def test_no_more_than_four_sizes_are_held_and_all_go_when_memory_is_freed(server: Server) -> None:
    free(server)
    for width in (8, 10, 12, 14, 18, 20):
        asked = replace(FLUX, size=(8, width), steps=4)
        is_the_same(server, asked)
        counts = graphs(server)
        assert all(1 <= rank["keys"] <= 4 and rank["bytes"] > 0 for rank in counts), counts
    free(server)


def test_what_decides_inside_stays_eager_and_is_told_once(server: Server) -> None:
    since, asked, cached = server.log_size(), replace(FLUX, steps=8), replace(TWO, step_cache=0.6)
    want = ours(server, asked, replace(cached, cuda_graphs="off"))
    for _ in range(2):
        assert torch.equal(ours(server, asked, cached), want)
    assert server.log(since).count("not recorded as a CUDA graph: flux_dev.safetensors: a step cache") == 1


def test_off_records_nothing_and_on_is_refused_without_a_gpu(server: Server) -> None:
    free(server)
    ours(server, FLUX, replace(TWO, cuda_graphs="off"))
    assert all(rank["keys"] == 0 for rank in graphs(server))
    with pytest.raises(NodeError, match="cuda_graphs on needs CUDA GPUs, and the workers run on cpu; choose auto"):
        ours(server, FLUX, replace(TWO, cuda_graphs="on"))


@pytest.mark.sweep
def test_the_bits_are_those_of_workers_that_record_nothing(server: Server) -> None:
    for asked in (FLUX, WAN):
        assert torch.equal(ours(server, asked), ours(server, asked, replace(TWO, cuda_graphs="off")))
