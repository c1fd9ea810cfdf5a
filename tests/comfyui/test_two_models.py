"""A guider with a MODEL for each prompt: workers have both, and ComfyUI's own loop evaluates them in turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import Tensor

from .cases import DEGREES
from .client import Graph
from .graphs import Job, Parallel
from .latents import apart, latent_of
from .server import Server
from .test_kin import ALGORITHMS, custom, link, node
from .test_weights import MODES

BAR = 1e-5  # of the latent's standard deviation
STAYS = "runs in ComfyUI's process"
FLUX = Job(family="flux_dev", cfg=2.0, size=(9, 14), prompt_tokens=(7, 12), batch=2)
ONE, RING, ULYSSES = Parallel(ring_degree=1, ulysses_degree=1), DEGREES["ring_2"], DEGREES["ulysses_2"]
IMAGES = Parallel(data_degree=2, cfg_degree=1)


def pair(parallel: Parallel | None, *, lora: bool = False, shift: bool = False, cfg: float = 2.5) -> Graph:
    """The second MODEL has other weights, and with `lora` a LoRA on them, with `shift` other noise levels."""
    negative = "other"
    prompts = {"positive": link("positive"), "negative": link("negative")}
    guider = node("DualModelGuider", model=link("model"), **prompts, cfg=cfg)
    graph = custom(FLUX, parallel, guider, ALGORITHMS["KSamplerSelect"], 0)
    graph["other"] = node("CheckpointLoaderSimple", ckpt_name="flux_dev_full.safetensors")
    if lora:
        graph["lora"] = node("LoraLoaderModelOnly", model=link("other"), lora_name="flux_dev.safetensors",
                             strength_model=1.0)  # fmt: skip
        negative = "lora"
    if shift:
        widgets = {"max_shift": 2.0, "base_shift": 0.1, "width": 512, "height": 512}
        graph["shift"] = node("ModelSamplingFlux", model=link(negative), **widgets)
        negative = "shift"
    graph["guider"]["inputs"]["model_negative"] = link(negative)
    return graph


def check(server: Server, graph: Callable[[Parallel | None], Graph], parallel: Parallel, bar: float = BAR) -> Tensor:
    want, since = latent_of(server.client.run(graph(None))), server.log_size()
    got = latent_of(server.client.run(graph(parallel)))
    print(f"APART {apart(got, want):.1e}")
    assert apart(got, want) <= bar
    assert STAYS not in server.log(since)
    return want


def test_on_one_worker_it_is_comfyuis_to_the_bit(server: Server) -> None:
    plain = check(server, pair, ONE, 0.0)
    patched = check(server, lambda parallel: pair(parallel, lora=True, shift=True), ONE, 0.0)
    assert apart(plain, patched) > 1e-3


@pytest.mark.parametrize("parallel", [RING, ULYSSES, IMAGES], ids=["ring", "ulysses", "images"])
def test_several_workers_divide_both(server: Server, parallel: Parallel) -> None:
    check(server, lambda parallel: pair(parallel, lora=True), parallel)


@pytest.mark.parametrize("mode", MODES)
def test_weights_elsewhere_are_those_of_both(server: Server, mode: str) -> None:
    check(server, lambda parallel: pair(parallel, lora=True), replace(RING, weights=mode))


def test_a_later_run_has_nothing_of_an_earlier_one(server: Server) -> None:
    """With and without a LoRA on the second MODEL, and at cfg 1, which leaves that out."""
    for lora, cfg in ((False, 2.5), (True, 2.5), (True, 1.0), (False, 2.5)):
        check(server, lambda parallel, lora=lora, cfg=cfg: pair(parallel, lora=lora, cfg=cfg), RING)  # type: ignore[misc]


def test_stages_of_a_pipeline_leave_the_loop_in_comfyui(server: Server) -> None:
    want, since = latent_of(server.client.run(pair(None))), server.log_size()
    assert apart(latent_of(server.client.run(pair(Parallel(pipeline_degree=2)))), want) <= BAR
    assert "uncond_model_patcher" in next(line for line in server.log(since).splitlines() if STAYS in line)
