"""Workers of unequal shares in a real ComfyUI: KSampler's latent, the VAE's pictures, the same bits from a shard."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ..groups import faulty
from .cases import DEGREES
from .client import NodeError
from .comfy import ComfyInstall
from .conditioning import picture
from .graphs import Job, Parallel, sampling_graph, with_loras
from .latents import apart, latent_of
from .server import Server, running_server
from .test_kin import link, node
from .test_weights import kept_weights
from .vae_graphs import BAR as VAE_BAR
from .vae_graphs import THREE, TWO, both, decoding

BAR = 1e-5  # of the latent's standard deviation
SHARED = {
    "3,2": replace(DEGREES["ulysses_2"], shares="3,2"),
    "1,4,2": replace(DEGREES["ring_3"], shares="1,4,2"),
    "1,4,2 by heads": Parallel(ring_degree=1, ulysses_degree=3, shares="1,4,2"),
}
NAMES = ["flux_kontext", "wan_phantom", "qwen_edit", "ltx2"]


@pytest.mark.sweep(one_in=5)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shared", SHARED.values(), ids=SHARED)
def test_networks_are_sampled_as_ksampler_does(
    server: Server, native_network: Callable[[str], Tensor], shared: Parallel, name: str
) -> None:
    assert apart(latent_of(server.client.run(picture(name, shared))), native_network(name)) <= BAR


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize(("file", "shape"), [("wan.safetensors", "1,16,2,11,7"), ("taef1", "1,16,9,14")])
@pytest.mark.parametrize("parallel", [replace(TWO, shares="3,2"), replace(THREE, shares="1,4,2")], ids=["2", "3"])
def test_pictures_are_the_vaes_own(vaes: Server, parallel: Parallel, file: str, shape: str) -> None:
    assert both(vaes, decoding, file, shape, parallel) <= VAE_BAR


@pytest.mark.parametrize(
    "shared",
    [pytest.param(SHARED["3,2"], id="3,2"), pytest.param(SHARED["1,4,2"], id="1,4,2", marks=pytest.mark.sweep)],
)
def test_a_shard_gives_the_bits_of_whole_weights(server: Server, shared: Parallel) -> None:
    job = Job(family="flux_dev", cfg=2.0, steps=2)
    latents = [
        latent_of(server.client.run(sampling_graph(job, "CPSampler", replace(shared, weights=weights))))
        for weights in ("replicate", "shard")
    ]
    assert torch.equal(*latents)


@pytest.mark.sweep  # a server of its own; tests/architectures and tests/planning have it without one
def test_workers_of_unlike_memory_have_as_much_of_the_weights_as_each_may_take(comfy: ComfyInstall) -> None:
    """A file of 28 MiB, and of two workers one may take 40 and one 24. By itself the first would compute in bfloat16:
    both do in what both have."""
    unlike = faulty("0 loaded in_half") | {"CP_MEMORY_GIB": f"{40 / 1024},{24 / 1024}"}
    with running_server(comfy, env=unlike) as server:
        job = Job(family="flux_dev", cfg=2.0, steps=2)
        native = latent_of(server.client.run(sampling_graph(job, "KSampler")))

        def run(weights: str, lora: float = 0.0) -> tuple[Tensor, list[float]]:
            parallel = replace(DEGREES["ulysses_2"], weights=weights)
            graph = sampling_graph(job, "CPSampler", parallel)
            latent = latent_of(server.client.run(with_loras(graph, [("flux_dev.safetensors", lora)] if lora else [])))
            return latent, [share for share, _ in kept_weights(server)]

        for lora in (0.0, 0.8):
            whole, (first, second) = run("replicate", lora)
            assert first == second == 1
            assert lora or apart(whole, native) <= BAR
            latent, (first, second) = run("auto", lora)
            assert torch.equal(latent, whole)
            assert first == 1, "it fits there"
            assert second < 0.75
            latent, (first, second) = run("shard", lora)
            assert torch.equal(latent, whole)
            assert first > second + 0.1
            assert first + second < 1.3
        graph = sampling_graph(job, "CPSampler", DEGREES["ulysses_2"])
        sampled = dict(model=link("model"), latent_image=link("latent"), positive=link("positive"))
        graph["plan"] = node("CPPlan", **sampled, cp_config=link("config"), cfg=2.0)
        (text,) = server.client.run(graph).outputs["plan"]["text"]
        assert re.search(r"blocks on the device: cpu 27\.7 MiB \(4/4\), cpu \d\.\d MiB \(0/4\)", text), text
        assert "All weights fit on cpu only: cpu would need" in text
        server.write_tiny("vaes")
        since = server.log_size()
        assert both(server, decoding, "taef1", "1,16,9,14", TWO) <= VAE_BAR
        assert re.search(r"rows are divided by free memory: cpu [5-8]\d%, cpu [2-4]\d%", server.log(since))


def test_another_number_of_shares_than_workers_is_refused(server: Server) -> None:
    graph = sampling_graph(Job(family="flux_dev"), "CPSampler", replace(DEGREES["ulysses_2"], shares="1,4,2"))
    with pytest.raises(NodeError, match=r"shares '1,4,2' has 3 number\(s\) for 2 worker\(s\); write 2"):
        server.client.run(graph)
