"""What workflows do to conditions and latents before the sampler: KSampler's latent, in any order, however often."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from .cases import DEGREES
from .client import Graph
from .graphs import Job, sampling_graph
from .latents import apart, latent_of
from .server import Server

BAR = 1e-4  # of the latent's standard deviation, float32
RING_2 = DEGREES["ring_2"]
FLUX = Job(family="flux_dev", cfg=2.0, size=(9, 14), prompt_tokens=(7, 12))
WAN = replace(FLUX, family="wan_t2v", size=(8, 12))
IMAGE = replace(FLUX, latent_seed=3)
TWO = replace(FLUX, batch=2)

GraphChange = Callable[[Graph], None]


def put(graph: Graph, name: str, kind: str, into: str = "", /, **inputs: Any) -> None:
    """Add a node; `into` is the sampler's socket that it feeds."""
    graph[name] = {"class_type": kind, "inputs": inputs}
    if into:
        graph["sampler"]["inputs"][into] = [name, 0]


def combine(graph: Graph, first: str, second: str) -> None:
    put(graph, "both", "ConditioningCombine", "positive", conditioning_1=[first, 0], conditioning_2=[second, 0])


def another_text(graph: Graph, tokens: int) -> None:
    graph["other"] = {**graph["positive"], "inputs": {**graph["positive"]["inputs"], "seed": 3003}}
    spec = graph["other"]["inputs"]["spec"].replace('"tokens": 7', f'"tokens": {tokens}')
    graph["other"]["inputs"]["spec"] = spec


def two_texts(kind: str, tokens: int, **widgets: Any) -> GraphChange:
    def change(graph: Graph) -> None:
        another_text(graph, tokens)
        first, second = SOCKETS[kind]
        put(graph, "both", kind, "positive", **{first: ["positive", 0], second: ["other", 0]}, **widgets)

    return change


SOCKETS = {
    "ConditioningAverage": ("conditioning_to", "conditioning_from"),
    "ConditioningConcat": ("conditioning_to", "conditioning_from"),
    "ConditioningCombine": ("conditioning_1", "conditioning_2"),
}


def one_after_the_other(graph: Graph) -> None:
    another_text(graph, 11)
    put(graph, "early", "ConditioningSetTimestepRange", conditioning=["positive", 0], start=0.0, end=0.4)
    put(graph, "late", "ConditioningSetTimestepRange", conditioning=["other", 0], start=0.4, end=1.0)
    combine(graph, "early", "late")


def second_text(kind: str, **widgets: Any) -> GraphChange:
    """A second text for a part of the picture."""

    def change(graph: Graph) -> None:
        another_text(graph, 3)
        put(graph, "part", kind, conditioning=["other", 0], **widgets)
        put(
            graph, "both", "ConditioningCombine", "positive", conditioning_1=["positive", 0], conditioning_2=["part", 0]
        )

    return change


def default_around_an_area(graph: Graph) -> None:
    another_text(graph, 9)
    put(graph, "part", "ConditioningSetAreaPercentage", conditioning=["positive", 0], width=0.5, height=0.6, x=0.2,
        y=0.2, strength=1.0)  # fmt: skip
    put(graph, "both", "ConditioningSetDefaultCombine", "positive", cond=["part", 0], cond_DEFAULT=["other", 0])


def masked_text(area: str) -> GraphChange:
    def change(graph: Graph) -> None:
        another_text(graph, 5)
        left_half(graph)
        put(graph, "part", "ConditioningSetMask", conditioning=["other", 0], mask=["mask", 0], strength=0.6,
            set_cond_area=area)  # fmt: skip
        put(
            graph, "both", "ConditioningCombine", "positive", conditioning_1=["positive", 0], conditioning_2=["part", 0]
        )

    return change


def left_half(graph: Graph) -> None:
    put(graph, "whole", "SolidMask", value=0.0, width=112, height=72)
    put(graph, "half", "SolidMask", value=0.8, width=56, height=72)
    put(graph, "mask", "MaskComposite", destination=["whole", 0], source=["half", 0], x=0, y=0, operation="add")


def on_the_negative(kind: str, **widgets: Any) -> GraphChange:
    return lambda graph: put(graph, "changed", kind, "negative", conditioning=["negative", 0], **widgets)


def on_the_positive(kind: str, /, **widgets: Any) -> GraphChange:
    return lambda graph: put(graph, "changed", kind, "positive", conditioning=["positive", 0], **widgets)


def on_the_latent(kind: str, **widgets: Any) -> GraphChange:
    return lambda graph: put(graph, "changed", kind, "latent_image", samples=["latent", 0], **widgets)


def noise_mask(graph: Graph) -> None:
    left_half(graph)
    put(graph, "changed", "SetLatentNoiseMask", "latent_image", samples=["latent", 0], mask=["mask", 0])


def two_latents_in_a_batch(graph: Graph) -> None:
    put(graph, "changed", "LatentBatch", "latent_image", samples1=["latent", 0], samples2=["latent", 0])


def sampled_with(**widgets: Any) -> GraphChange:
    return lambda graph: graph["sampler"]["inputs"].update(widgets)


CHANGES: dict[str, tuple[Job, GraphChange]] = {
    "timestep ranges": (FLUX, one_after_the_other),
    "timestep ranges of a video": (WAN, one_after_the_other),
    "area": (FLUX, second_text("ConditioningSetArea", width=64, height=64, x=16, y=8, strength=0.7)),
    "area in percent": (
        FLUX, second_text("ConditioningSetAreaPercentage", width=0.5, height=0.6, x=0.3, y=0.2, strength=1.3)),
    "area of a video": (
        WAN, second_text("ConditioningSetAreaPercentageVideo", width=0.5, height=0.5, temporal=1.0, x=0.2, y=0.2, z=0.0,
                    strength=0.9)),
    "strength": (FLUX, second_text("ConditioningSetAreaStrength", strength=0.3)),
    "mask": (FLUX, masked_text("default")),
    "mask and its bounds": (FLUX, masked_text("mask bounds")),
    "default": (FLUX, default_around_an_area),
    "average": (FLUX, two_texts("ConditioningAverage", 4, conditioning_to_strength=0.3)),
    "concat": (FLUX, two_texts("ConditioningConcat", 5)),
    "combine": (WAN, two_texts("ConditioningCombine", 21)),
    "zeroed out": (FLUX, on_the_negative("ConditioningZeroOut")),
    "guidance": (FLUX, on_the_positive("FluxGuidance", guidance=1.5)),
    "an input of the network": (FLUX, on_the_positive("CPTestOddCondition", kind="made already")),
    "no guidance": (FLUX, on_the_positive("FluxDisableGuidance")),
    "noise mask": (replace(IMAGE, denoise=0.7), noise_mask),
    "repeated latent": (FLUX, on_the_latent("RepeatLatentBatch", amount=2)),
    "one of a batch": (TWO, on_the_latent("LatentFromBatch", batch_index=1, length=1)),
    "the same noise for both": (TWO, on_the_latent("LatentBatchSeedBehavior", seed_behavior="fixed")),
    "two latents in a batch": (IMAGE, two_latents_in_a_batch),
    "denoise": (IMAGE, sampled_with(denoise=0.37, steps=3)),
    "CFG++": (FLUX, sampled_with(sampler_name="dpmpp_2m_cfg_pp", cfg=1.0)),
    "CFG++ with noise": (WAN, sampled_with(sampler_name="euler_ancestral_cfg_pp", cfg=1.3)),
}  # fmt: skip


@pytest.mark.sweep(one_in=4)
@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_condition_or_latent_gives_ksamplers_latent(server: Server, name: str) -> None:
    job, change = CHANGES[name]
    want = latent_of(server.client.run(native(job, change)))
    plain = latent_of(server.client.run(sampling_graph(job, "KSampler")))
    got, side_by_side = sample(server, name), sample(server, name, ring_degree=1, cfg_degree=2)
    print(f"APART {name} {apart(got, want):.1e}, prompts side by side {apart(side_by_side, want):.1e}")
    assert apart(got, want) <= BAR
    assert apart(side_by_side, want) <= BAR
    assert plain.shape != want.shape or apart(plain, want) > 100 * BAR, "the change does something"


@pytest.mark.sweep
def test_the_order_of_the_runs_changes_no_bit(server: Server) -> None:
    names = random.Random(5).sample(list(CHANGES), 10)
    first_latents = {name: sample(server, name) for name in names}
    for name in [*reversed(names), names[3], names[3]]:
        assert torch.equal(sample(server, name), first_latents[name]), name


def sample(server: Server, name: str, **degrees: int) -> torch.Tensor:
    job, change = CHANGES[name]
    graph = sampling_graph(job, "CPSampler", RING_2)
    graph["config"]["inputs"] |= degrees
    change(graph)
    return latent_of(server.client.run(graph))


def native(job: Job, change: GraphChange) -> Graph:
    graph = sampling_graph(job, "KSampler")
    change(graph)
    return graph
