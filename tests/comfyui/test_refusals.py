"""What a worker cannot honour is refused by name, before any worker is started."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from .cases import DEGREES
from .client import Graph, NodeError
from .graphs import Job, Parallel, sampling_graph, with_attention_patch, with_control_net
from .server import Server

FLUX = Job(family="flux_dev", cfg=2.0)


@pytest.mark.parametrize(
    ("changed", "name"),
    [(with_attention_patch, "attn1_patch"), (with_control_net, "ControlNet")],
    ids=["attention_patch", "control_net"],
)
def test_what_changes_the_model_unseen_is_refused_by_name(
    server: Server, changed: Callable[[Graph], Graph], name: str
) -> None:
    before = server.children()
    with pytest.raises(NodeError, match=f"(?i){name}"):
        server.client.run(changed(sampling_graph(FLUX, "CPSampler", DEGREES["ring_2"])))
    assert server.children() == before


def test_more_ranks_than_devices_are_refused_before_a_process_starts(server: Server) -> None:
    before = server.children()
    nine = Parallel(ring_degree=3, ulysses_degree=3, devices="cuda:0")
    with pytest.raises(NodeError, match=r"cuda:0|GPU 0"):
        server.client.run(sampling_graph(FLUX, "CPSampler", nine))
    assert server.children() == before


@pytest.mark.parametrize("devices", ["cuda:banana", "tpu:0"])
def test_a_device_list_that_is_none_is_refused_with_the_value_found(server: Server, devices: str) -> None:
    before = server.children()
    with pytest.raises(NodeError, match=devices):
        server.client.run(sampling_graph(FLUX, "CPSampler", Parallel(devices=devices)))
    assert server.children() == before


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ("1,8,16,24", "16 channels"),
        ("16,16,24", "shape .16, 16, 24."),
        ("1,16,2,8,8", "wants .batch"),
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
    with pytest.raises(NodeError, match="negative: the CONDITIONING is 96 wide, a flux model wants 128"):
        server.client.run(graph)


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
