"""Noise masks that differ from image to image: each image keeps what its own mask keeps, by every sampler node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from .cases import DEGREES
from .client import Graph
from .conditioning import picture
from .graphs import Job, Parallel, sampling_graph
from .latents import apart, latent_of
from .server import Server
from .test_kin import ALGORITHMS, GUIDERS, advanced, custom, link, node, on_the_loader

BAR = 1e-4  # of the latent's standard deviation, float32
FLUX = Job(family="flux_dev", cfg=2.0, steps=3, size=(9, 14), batch=3, masked=3, latent_seed=3)
RING, IMAGES, PROMPTS = DEGREES["ring_2"], Parallel(data_degree=2, cfg_degree=1), Parallel(cfg_degree=2)

Picture = Callable[[Job, Parallel | None], Graph]


def plain(job: Job, parallel: Parallel | None) -> Graph:
    return sampling_graph(job, "CPSampler" if parallel else "KSampler", parallel)


def with_a_guider(job: Job, parallel: Parallel | None) -> Graph:
    return custom(job, parallel, GUIDERS["CFGGuider"], ALGORITHMS["SamplerEulerAncestral"], 0)


def without_a_guider(job: Job, parallel: Parallel | None) -> Graph:
    graph = with_a_guider(job, parallel)
    kept = ("sampler", "sigmas", "latent_image", "cp_config")
    given = {name: value for name, value in graph["sampler"]["inputs"].items() if name in kept}
    graph["sampler"] = node(
        "CPSamplerCustomBasic" if parallel else "SamplerCustom",
        model=link("model"), positive=link("positive"), negative=link("negative"), cfg=job.cfg, add_noise=True,
        noise_seed=job.seed, **given,
    )  # fmt: skip
    return graph


def with_a_native_sampler(job: Job, parallel: Parallel | None) -> Graph:
    graph = sampling_graph(job, "KSampler")
    return on_the_loader(graph, job, parallel) if parallel else graph


def with_the_model(kind: str, /, **widgets: Any) -> Picture:
    def changed(job: Job, parallel: Parallel | None) -> Graph:
        graph = plain(job, parallel)
        graph["changed"] = node(kind, model=link("model"), **widgets)
        graph["sampler"]["inputs"]["model"] = link("changed")
        return graph

    return changed


SAMPLERS: dict[str, Picture] = {
    "KSampler": plain,
    "KSamplerAdvanced": advanced,
    "SamplerCustomAdvanced": with_a_guider,
    "SamplerCustom": without_a_guider,
    "KSampler on CP Load": with_a_native_sampler,
}


@pytest.mark.parametrize("parallel", [RING, IMAGES], ids=["ring", "images"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_image_has_its_own_mask(server: Server, name: str, parallel: Parallel) -> None:
    check(server, SAMPLERS[name], FLUX, parallel)


@pytest.mark.parametrize(
    ("shape", "parallel"),
    [
        pytest.param(replace(FLUX, batch=4, masked=2), IMAGES, id="two masks for four images"),
        pytest.param(replace(FLUX, masked=2), PROMPTS, id="two masks for three images"),
        pytest.param(replace(FLUX, family="wan_t2v", batch=2, masked=2, size=(8, 12)), IMAGES, id="videos"),
        pytest.param(replace(FLUX, family="ltxv", batch=2, masked=2), IMAGES, id="videos whose network sees masks"),
    ],
)
def test_masks_are_dealt_out_as_natively(server: Server, shape: Job, parallel: Parallel) -> None:
    check(server, plain, shape, parallel)


@pytest.mark.parametrize(
    "picture_of",
    [
        pytest.param(with_the_model("DifferentialDiffusion", strength=0.5), id="by their greys"),
        pytest.param(with_the_model("CPTestForeignWrapper", kind="masks of channels"), id="for each channel"),
    ],
)
def test_what_changes_masks_on_the_way_gets_each_images_own(server: Server, picture_of: Picture) -> None:
    check(server, picture_of, FLUX, RING)


@pytest.mark.parametrize("parallel", [RING, IMAGES], ids=["ring", "images"])
@pytest.mark.parametrize("native", [False, True], ids=["CPSampler", "KSampler on CP Load"])
@pytest.mark.sweep(one_in=2)
def test_video_and_audio_have_masks_of_their_own(
    server: Server, native_network: Callable[[str], Tensor], native: bool, parallel: Parallel
) -> None:
    """LTX-2 goes by the masks of the whole batch."""
    native_network("ltx2")

    def both(job: Job, side: Parallel | None) -> Graph:
        graph = picture("ltx2", None if native else side)
        graph["latent"]["inputs"]["masked"] = 2
        return on_the_loader(graph, job, side) if native and side else graph

    check(server, both, replace(FLUX, family="networks/ltx2"), parallel)


def check(server: Server, picture_of: Picture, job: Job, parallel: Parallel) -> None:
    want, got = (latent_of(server.client.run(picture_of(job, side))) for side in (None, parallel))
    print(f"APART {apart(got, want):.1e}")
    assert apart(got, want) <= BAR
