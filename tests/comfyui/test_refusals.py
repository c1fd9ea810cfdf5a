"""Bad input is refused by name, before any worker is started. More: test_foreign.py, test_lora.py, test_loaded.py."""

from __future__ import annotations

import os

import pytest

from .cases import DEGREES
from .client import NodeError
from .graphs import Job, Parallel, sampling_graph
from .latents import apart, latent_of
from .server import Server
from .test_kin import link, node

RING_2 = DEGREES["ring_2"]
FLUX = Job(family="flux_dev", cfg=2.0)
WAN = Job(family="wan_t2v", cfg=2.0)


@pytest.fixture(autouse=True)
def warm(server: Server) -> None:
    """Workers that live: none are started ahead of a refusal that takes its time, and one that fails is missed."""
    server.client.run(sampling_graph(FLUX, "CPSampler", RING_2))


def test_more_ranks_than_devices_are_refused_before_a_process_starts(server: Server) -> None:
    before, since = server.children(), server.log_size()
    nine = Parallel(ring_degree=3, ulysses_degree=3, devices="cuda:0")
    with pytest.raises(NodeError, match=r"cuda:0|GPU 0"):
        server.client.run(sampling_graph(FLUX, "CPSampler", nine))
    assert server.children() == before
    assert "GPU 0" in server.log(since)
    assert "Traceback" not in server.log(since), "it is no crash"


@pytest.mark.parametrize("devices", ["cuda:banana", "tpu:0"])
def test_a_device_list_that_is_none_is_refused_with_the_value_found(server: Server, devices: str) -> None:
    before = server.children()
    with pytest.raises(NodeError, match=devices):
        server.client.run(sampling_graph(FLUX, "CPSampler", Parallel(devices=devices)))
    assert server.children() == before
    *_, last = server.client.get("/cp/status")["runs"]
    assert (last["end"], last["phases"]) == ("refused", [])
    assert devices in str(last["reason"])


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ("1,8,16,24", "16 channels"),
        ("16,16,24", "shape .16, 16, 24."),
        ("1,16,2,8,8", "needs .batch"),
        ("1,16,0,8", "empty"),
    ],
)
def test_a_latent_that_the_model_cannot_take_is_refused_with_its_shape(server: Server, shape: str, says: str) -> None:
    graph = sampling_graph(FLUX, "CPSampler", DEGREES["ring_2"])
    graph["latent"]["inputs"] |= {"shape": shape, "seed": 3}
    with pytest.raises(NodeError, match=f"the LATENT has the shape.*{says}|{says}"):
        server.client.run(graph)


def test_conditioning_of_another_model_is_refused_with_both_widths(server: Server) -> None:
    graph = sampling_graph(FLUX, "CPSampler", DEGREES["ring_2"])
    graph["negative"]["inputs"]["spec"] = '{"tokens": 5, "dim": 96, "pooled": 64}'
    with pytest.raises(NodeError, match="negative: the CONDITIONING is 96 wide, a FLUX model needs 128"):
        server.client.run(graph)


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("consumer", ["CPSampler", "CPPlan"])
@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ('{"tokens": 5, "dim": 96, "pooled": 64}', "positive: the CONDITIONING is 96 wide, a FLUX model needs 128"),
        ('{"tokens": 5, "dim": 128, "pooled": 63}', "positive: the pooled text of the CONDITIONING is 63 wide"),
        ('{"tokens": 0, "dim": 128, "pooled": 64}', "positive: the CONDITIONING has no tokens"),
    ],
    ids=["width", "pooled width", "no tokens"],
)
def test_the_plan_and_the_sampler_refuse_the_same_conditioning(
    server: Server, consumer: str, spec: str, says: str
) -> None:
    graph = sampling_graph(FLUX, "CPSampler", DEGREES["ring_2"])
    graph["positive"]["inputs"]["spec"] = spec
    if consumer == "CPPlan":
        graph["plan"] = node(
            "CPPlan", model=link("model"), latent_image=link("latent"), positive=link("positive"), cfg=2.0
        )
        graph = {name: graph[name] for name in ("model", "positive", "latent", "plan")}
    with pytest.raises(NodeError, match=f"{consumer}: .*Refused: {says}"):
        server.client.run(graph)


def test_a_prompt_without_tokens_is_sampled_where_comfyui_can(server: Server) -> None:
    native, ours = sampling_graph(WAN, "KSampler"), sampling_graph(WAN, "CPSampler", DEGREES["ring_2"])
    for graph in (native, ours):
        graph["positive"]["inputs"]["spec"] = '{"tokens": 0, "dim": 4096}'
    assert apart(*(latent_of(server.client.run(graph)) for graph in (ours, native))) <= 1e-4


def test_a_file_that_changed_under_a_loaded_model_is_refused_and_not_sampled_with(server: Server) -> None:
    job = Job(family="flux_schnell")
    server.client.run(sampling_graph(job, "CPSampler", DEGREES["ring_2"]))
    file = server.base / "models" / "diffusion_models" / "flux_schnell.safetensors"
    before = file.stat()
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    try:
        with pytest.raises(NodeError, match="changed on disk after this MODEL was loaded"):
            server.client.run(sampling_graph(job, "CPSampler", DEGREES["ring_2"]))
    finally:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    server.client.run(sampling_graph(job, "CPSampler", DEGREES["ring_2"]))
