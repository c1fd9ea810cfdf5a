"""CP Sampler gives KSampler's latent: same file, same server, every family, every way to divide the work."""

from __future__ import annotations

import pytest
import torch

from .cases import DEGREES, job, parity_cases
from .graphs import Job, Parallel, sampling_graph
from .latents import apart, latent_of
from .server import Server
from .test_kin import on_the_loader

BAR = 1e-4  # of the latent's standard deviation, float32


@pytest.fixture(scope="module")
def native_latents() -> dict[Job, torch.Tensor]:
    return {}


@pytest.mark.sweep(one_in=11)
@pytest.mark.parametrize(("degrees", "family", "variation"), parity_cases())
def test_the_latent_is_ksamplers(
    server: Server, native_latents: dict[Job, torch.Tensor], degrees: str, family: str, variation: str
) -> None:
    asked = job(family, variation)
    if asked not in native_latents:
        native_latents[asked] = latent_of(server.client.run(sampling_graph(asked, "KSampler")))
    got = latent_of(server.client.run(sampling_graph(asked, "CPSampler", DEGREES[degrees])))
    assert apart(got, native_latents[asked]) <= BAR


@pytest.mark.parametrize(
    "parallel",
    [
        Parallel(ring_degree=2, rotate_method="allgather"),
        Parallel(ring_degree=2, convert_to_fp32=False),
        Parallel(ring_degree=2, attention_backend="native"),
        Parallel(),
        None,
    ],
    ids=["allgather", "merge_without_fp32", "native_attention", "everything_auto", "no_config"],
)
def test_every_setting_of_the_config_keeps_parity(server: Server, parallel: Parallel | None) -> None:
    asked = job("flux_dev", "guided")
    want = latent_of(server.client.run(sampling_graph(asked, "KSampler")))
    got = latent_of(server.client.run(sampling_graph(asked, "CPSampler", parallel)))
    assert apart(got, want) <= BAR


def test_a_model_from_a_full_checkpoint_is_sampled_from_that_checkpoint(server: Server) -> None:
    asked = Job(family="flux_dev", cfg=2.0, full_checkpoint=True)
    want = latent_of(server.client.run(sampling_graph(asked, "KSampler")))
    other = latent_of(server.client.run(sampling_graph(Job(family="flux_dev", cfg=2.0), "KSampler")))
    got = latent_of(server.client.run(sampling_graph(asked, "CPSampler", DEGREES["ring_2"])))
    assert apart(got, want) <= BAR
    assert apart(got, other) > 0.1, "the checkpoint has weights of its own"


def test_a_latent_has_the_keys_that_ksampler_gives_it(server: Server) -> None:
    asked = job("flux_dev", "inpainting")
    saved = [
        server.client.run(sampling_graph(asked, "KSampler")),
        server.client.run(sampling_graph(asked, "CPSampler", DEGREES["ring_2"])),
    ]
    want, got = (run.outputs["save"]["cp_test"][0]["keys"] for run in saved)
    assert got == want


def test_ltx_video_gives_each_token_the_timestep_of_its_mask(server: Server) -> None:
    asked = job("ltxv", "inpainting")
    want = latent_of(server.client.run(sampling_graph(asked, "KSampler")))
    assert apart(latent_of(server.client.run(sampling_graph(asked, "CPSampler", DEGREES["ring_2"]))), want) <= BAR
    native = on_the_loader(sampling_graph(asked, "KSampler"), asked, DEGREES["ring_2"])
    assert apart(latent_of(server.client.run(native)), want) <= BAR


@pytest.mark.parametrize("weight_dtype", ["fp8_e4m3fn", "fp8_e5m2"])
def test_weights_that_the_loader_rounds_are_rounded_in_the_workers(server: Server, weight_dtype: str) -> None:
    graphs = [
        sampling_graph(Job(family="flux_schnell", cfg=2.0), sampler, parallel)
        for sampler, parallel in (("KSampler", None), ("CPSampler", DEGREES["ring_2"]), ("KSampler", None))
    ]
    for graph in graphs[:2]:
        graph["model"]["inputs"]["weight_dtype"] = weight_dtype
    native, ours, unrounded = (latent_of(server.client.run(graph)) for graph in graphs)
    assert apart(ours, native) <= BAR
    assert apart(unrounded, native) > 100 * BAR
