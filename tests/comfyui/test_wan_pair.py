"""Wan 2.2's two models: one for high noise, one for low, in two samplers of a graph."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from ..zoo import checkpoints
from .cases import DEGREES
from .client import Graph
from .graphs import Job, Parallel
from .latents import apart, latent_of
from .server import Server
from .test_kin import advanced, link, node

BAR = 1e-4  # of the latent's standard deviation, float32
WAN = Job(family="wan_t2v", cfg=2.0, size=(8, 12), prompt_tokens=(7, 12))
PLACE = "diffusion_model.blocks.0.self_attn.q"


@pytest.fixture(scope="module")
def wan_pair(shared_server: Server) -> None:
    """A second model and a LoRA for it, in the server's folders."""
    models = shared_server.base / "models"
    low = checkpoints.write(models / "diffusion_models", "wan_t2v", seed=99)
    low.rename(low.with_name("wan_low_noise.safetensors"))
    dice = torch.Generator().manual_seed(6)
    out, inner = checkpoints.tensors("wan_t2v")[0][f"{PLACE.removeprefix('diffusion_model.')}.weight"].shape
    lora = {
        f"{PLACE}.lora_up.weight": torch.randn(out, 4, generator=dice) * 0.2,
        f"{PLACE}.lora_down.weight": torch.randn(4, inner, generator=dice) * 0.2,
    }
    save_file(lora, models / "loras" / "wan_low_noise.safetensors")


def pair(parallel: Parallel | None, *, seed: int = 7) -> Graph:
    """As Wan 2.2's workflow: a shift on both, a LoRA on one."""
    graph = advanced(WAN, parallel)
    graph["first"]["inputs"]["noise_seed"] = seed
    graph["low"] = node("UNETLoader", unet_name="wan_low_noise.safetensors", weight_dtype="default")
    graph["lora"] = node(
        "LoraLoaderModelOnly", model=link("low"), lora_name="wan_low_noise.safetensors", strength_model=0.8
    )
    for sampler, model in (("first", "model"), ("sampler", "lora")):
        graph[f"{sampler}_shift"] = node("ModelSamplingSD3", model=link(model), shift=5.0)
        graph[sampler]["inputs"]["model"] = link(f"{sampler}_shift")
    return graph


@pytest.mark.usefixtures("wan_pair")
def test_the_pair_gives_the_native_pairs_latent_in_the_first_queue_and_in_the_tenth(server: Server) -> None:
    native = latent_of(server.client.run(pair(None)))
    ours = [latent_of(server.client.run(pair(DEGREES["ring_2"]))) for _ in range(10)]
    print(f"APART {apart(ours[0], native):.1e}")
    assert apart(ours[0], native) <= BAR
    assert all(torch.equal(latent, ours[0]) for latent in ours)


@pytest.mark.usefixtures("wan_pair")
def test_another_seed_uses_both_models_again(server: Server) -> None:
    for seed, degrees in ((8, "ulysses_2"), (9, "pipeline_2"), (8, "pipeline_2"), (8, "ulysses_2")):
        native, ours = (latent_of(server.client.run(pair(side, seed=seed))) for side in (None, DEGREES[degrees]))
        assert apart(ours, native) <= BAR, seed


@pytest.mark.usefixtures("wan_pair")
def test_the_second_model_matters(server: Server) -> None:
    both = pair(DEGREES["ring_2"])
    alone = pair(DEGREES["ring_2"])
    alone["sampler"]["inputs"]["model"] = link("first_shift")
    assert apart(*(latent_of(server.client.run(graph)) for graph in (alone, both))) > 0.05
