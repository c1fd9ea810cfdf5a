"""The nodes that feed CP Sampler Custom (Advanced), with settings that are not their defaults."""

from __future__ import annotations

from typing import Any

import pytest

from .client import Graph
from .graphs import Job
from .grid import AMPLIFIED
from .latents import apart, latent_of
from .server import Server
from .test_kin import ALGORITHMS, BAR, FLUX, GUIDERS, SIDES, custom, link, node

WAN = Job(family="wan_t2v", cfg=2.0, size=(8, 12), prompt_tokens=(7, 12))
SAMPLERS = {
    "SamplerLMS": {"order": 2},
    "SamplerDPMPP_SDE": {"eta": 0.6, "s_noise": 1.1, "r": 0.4, "noise_device": "cpu"},
    "SamplerDPMPP_3M_SDE": {"eta": 0.5, "s_noise": 0.9, "noise_device": "gpu"},
    "SamplerDPMPP_2S_Ancestral": {"eta": 0.4, "s_noise": 1.2},
    "SamplerEulerAncestralCFGPP": {"eta": 0.7, "s_noise": 0.8},
    "SamplerSASolver": {
        "model": link("model"), "eta": 0.8, "sde_start_percent": 0.1, "sde_end_percent": 0.9, "s_noise": 1.1,
        "predictor_order": 2, "corrector_order": 3, "use_pece": True, "simple_order_2": True,
    },
    "SamplerSEEDS2": {"solver_type": "phi_2", "eta": 0.7, "s_noise": 1.1, "r": 0.3},
    "SamplerER_SDE": {"solver_type": "Reverse-time SDE", "max_stage": 2, "eta": 0.6, "s_noise": 1.1},
    "SamplerLCM": {"s_noise": 1.2, "s_noise_end": 0.8, "noise_clip_std": 2.0},
    "SamplerLCMUpscale": {"scale_ratio": 1.6, "scale_steps": 2, "upscale_method": "bicubic"},
    "SamplerEulerCFGpp": {"version": "alternative"},
}  # fmt: skip
MORE_GUIDERS = {
    "PerpNegGuider": node(
        "PerpNegGuider", model=link("model"), positive=link("positive"), negative=link("negative"),
        empty_conditioning=link("third"), cfg=2.5, neg_scale=0.6,
    ),
    "nested DualCFGGuider": {
        **GUIDERS["DualCFGGuider"], "inputs": {**GUIDERS["DualCFGGuider"]["inputs"], "style": "nested"}},
}  # fmt: skip
SIGMAS: dict[str, Graph] = {
    "ManualSigmas": {"sigmas": node("ManualSigmas", sigmas="0.9, 0.5, 0.2")},
    "SplitSigmas": {"split": node("SplitSigmas", sigmas=link("all"), step=2)},
    "FlipSigmas": {
        "flipped": node("FlipSigmas", sigmas=link("low", 1)),
        "low": node("SplitSigmas", sigmas=link("all"), step=2),  # not up to 1, which divides by nothing in ComfyUI
    },
    "BetaSamplingScheduler": {
        "sigmas": node("BetaSamplingScheduler", model=link("model"), steps=5, alpha=0.4, beta=0.8)
    },
}


@pytest.mark.sweep(one_in=7)
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_node_keeps_its_settings(server: Server, name: str) -> None:
    job = WAN if name in ("SamplerDPMPP_3M_SDE", "SamplerSEEDS2") else FLUX
    check(server, [custom(job, side, GUIDERS["CFGGuider"], node(name, **SAMPLERS[name]), 0) for side in SIDES.values()])


@pytest.mark.parametrize("name", MORE_GUIDERS)
def test_every_guider_keeps_its_settings(server: Server, name: str) -> None:
    guided = [custom(FLUX, side, MORE_GUIDERS[name], ALGORITHMS["KSamplerSelect"], 0) for side in SIDES.values()]
    check(server, guided)


@pytest.mark.sweep(one_in=7)
@pytest.mark.parametrize("name", SIGMAS)
@pytest.mark.parametrize("noise", ["RandomNoise", "DisableNoise"])
def test_every_schedule_is_followed(server: Server, name: str, noise: str) -> None:
    sides = [None, SIDES["ours"], None]
    graphs = [custom(FLUX, side, GUIDERS["CFGGuider"], ALGORITHMS["KSamplerSelect"], 0) for side in sides]
    for graph in graphs:
        graph["latent"]["inputs"]["seed"] = 3
        if noise == "DisableNoise":
            graph["noise"] = node(noise)
        graph["all"] = graph["sigmas"]
        graph |= SIGMAS[name]
        graph["sampler"]["inputs"]["sigmas"] = link(next(iter(SIGMAS[name])))
    graphs[2]["loaded"] = graphs[2]["model"]
    graphs[2]["model"] = node("CPTestOneUlp", model=link("loaded"))
    native, ours, one_ulp = (latent_of(server.client.run(graph)) for graph in graphs)
    print(f"APART {apart(ours, native):.1e}, one ulp {apart(one_ulp, native):.1e}")
    assert apart(ours, native) <= max(BAR, AMPLIFIED * apart(one_ulp, native)), "FlipSigmas begins by dividing by 1e-4"


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("guidance", ["VideoLinearCFGGuidance", "VideoTriangleCFGGuidance"])
def test_guidance_that_changes_over_a_video_is_followed(server: Server, guidance: str) -> None:
    graphs = [custom(WAN, side, GUIDERS["CFGGuider"], ALGORITHMS["KSamplerSelect"], 0) for side in SIDES.values()]
    for graph in graphs:
        graph["loaded"] = graph["model"]
        graph["model"] = node(guidance, model=link("loaded"), min_cfg=1.0)
    check(server, graphs)


def check(server: Server, graphs: list[Any]) -> None:
    native, ours = (latent_of(server.client.run(graph)) for graph in graphs)
    print(f"APART {apart(ours, native):.1e}")
    assert apart(ours, native) <= BAR
