"""Every network that has a plan, from its file, with what its users give it, at odd sizes: KSampler's latent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from .cases import DEGREES
from .conditioning import BY_ROWS, JOB, SAMPLED, picture
from .graphs import Parallel, with_loras
from .latents import apart, latent_of
from .server import Server
from .test_kin import link, node, on_the_loader

BARS = {
    "1_worker": 2e-6,
    "ring_3": 1e-5,
    "ring_2_x_ulysses_2": 1e-5,
    "pipeline_2": 1e-5,
}  # of the latent's standard deviation


@pytest.mark.sweep(one_in=34)
@pytest.mark.parametrize(
    ("degrees", "name"),
    [(degrees, name) for degrees in BARS for name in SAMPLED if degrees != "pipeline_2" or name not in BY_ROWS],
)
def test_it_is_sampled_as_ksampler_does(
    server: Server, native_network: Callable[[str], Tensor], degrees: str, name: str
) -> None:
    since = server.log_size()
    got = latent_of(server.client.run(picture(name, DEGREES[degrees])))
    assert apart(got, native_network(name)) <= BARS[degrees]
    assert "the sampler runs in ComfyUI's process" not in server.log(since)


@pytest.mark.parametrize("degrees", [Parallel(cfg_degree=2), Parallel(data_degree=2)], ids=["prompts", "images"])
def test_who_trades_the_halves_of_its_batch_has_all_of_it(
    server: Server, native_network: Callable[[str], Tensor], degrees: Parallel
) -> None:
    got = latent_of(server.client.run(picture("hunyuan_3d_21", degrees)))
    assert apart(got, native_network("hunyuan_3d_21")) <= 1e-5


@pytest.mark.sweep(one_in=5)
@pytest.mark.parametrize("name", ["minimax_h3", "minimax_h3_keyframes", "minimax_h3_references"])
@pytest.mark.parametrize(
    "degrees",
    [
        Parallel(cfg_degree=2),
        Parallel(ulysses_degree=2),
        Parallel(cfg_degree=2, ulysses_degree=2),
        Parallel(ulysses_degree=3),
        Parallel(ring_degree=4),
    ],
    ids=["cfg 2", "Ulysses 2", "cfg 2 x Ulysses 2", "Ulysses 3", "ring 4"],
)
def test_minimax_h3_with_sound_and_pictures_is_ksamplers_on_two_to_four_workers(
    server: Server, native_network: Callable[[str], Tensor], degrees: Parallel, name: str
) -> None:
    """By frames of its own, by references of each kind, by the prompt alone."""
    got = latent_of(server.client.run(picture(name, degrees)))
    assert apart(got, native_network(name)) <= 1e-5


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize("name", ["minimax_h3_keyframes", "minimax_h3_references"])
@pytest.mark.parametrize("degrees", ["1_worker", "ulysses_2", "ring_2", "ring_3", "pipeline_2"])
@pytest.mark.usefixtures("native_network")  # which writes the files
def test_minimax_h3_with_a_control_network_whose_video_a_vae_encodes(vaes: Server, degrees: str, name: str) -> None:
    latents, since = [], vaes.log_size()
    for parallel, controlled in (None, True), (DEGREES[degrees], True), (None, False):
        graph = picture(name, parallel)
        if controlled:
            graph["vae"] = node("VAELoader", vae_name="minimax_h3.safetensors")
            graph["video"] = node("CPTestPictures", shape="9,64,96,3", seed=2, nonce=0)
            given = {"model": link("model"), "vae": link("vae"), "video": link("video")}
            graph["control"] = node("CPTestH3Control", **given)
            graph["sampler"]["inputs"]["model"] = link("control")
        latents.append(latent_of(vaes.client.run(graph)))
    native, got, plain = latents
    print(f"APART {name} {degrees} {apart(got, native):.1e}")
    assert apart(got, native) <= 1e-5
    assert apart(plain, native) > 1e-2, "it does something"
    assert "the sampler runs in ComfyUI's process" not in vaes.log(since)


@pytest.mark.parametrize("name", ["qwen_edit", "ltx2"])
def test_in_the_stages_of_a_pipeline(server: Server, native_network: Callable[[str], Tensor], name: str) -> None:
    """With a reference, and with two streams of tokens: video and audio."""
    got = latent_of(server.client.run(picture(name, DEGREES["pipeline_2"])))
    assert apart(got, native_network(name)) <= BARS["pipeline_2"]


LOADED = (
    "z_image_pixels", "z_image", "stable_audio", "ltx2", "wandancer", "wan_scail", "pid", "anima", "lens",
    "minimax_h3",
)  # fmt: skip


@pytest.mark.sweep(one_in=4)
@pytest.mark.parametrize("name", LOADED)
def test_on_the_loader_it_is_sampled_by_ksampler(
    server: Server, native_network: Callable[[str], Tensor], name: str
) -> None:
    graph = on_the_loader(picture(name), replace(JOB, family=f"networks/{name}"), DEGREES["ring_2"])
    assert apart(latent_of(server.client.run(graph)), native_network(name)) <= BARS["ring_3"]


@pytest.mark.parametrize("name", ["sd35_medium", "stable_audio"])
@pytest.mark.usefixtures("native_network")  # which writes the files
def test_buffers_of_the_file_are_rounded_like_its_weights(server: Server, name: str) -> None:
    native, got = (picture(name, parallel) for parallel in (None, DEGREES["1_worker"]))
    for graph in native, got:
        graph["model"]["inputs"]["weight_dtype"] = "fp8_e4m3fn"
    assert torch.equal(*(latent_of(server.client.run(graph)) for graph in (native, got)))


@pytest.mark.parametrize("loaded", [False, True], ids=["CPSampler", "KSampler"])
def test_keys_of_a_prompt_are_those_of_the_weights_that_a_run_has(
    server: Server, native_network: Callable[[str], Tensor], loaded: bool
) -> None:
    """HiDream O1's network keeps them, and a LoRA on the run before was in them."""
    name, native = "hidream_o1", native_network("hidream_o1")
    keys = "diffusion_model.language_model.layers.0.self_attn.v_proj.diff"
    save_file({keys: 0.3 * torch.ones(128, 128)}, server.base / "models" / "loras" / "keys.safetensors")
    for stack in ([("keys.safetensors", 1.0)], []):
        graph = picture(name, None if loaded else DEGREES["ring_2"])
        if loaded:
            graph = on_the_loader(graph, replace(JOB, family=f"networks/{name}"), DEGREES["ring_2"])
        got = latent_of(server.client.run(with_loras(graph, stack)))
        assert (apart(got, native) > 0.01) == bool(stack)
    assert apart(got, native) <= BARS["ring_3"]
