"""Progress and previews are those that ComfyUI sends for its own samplers, a node at a time."""

from __future__ import annotations

import io
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from PIL import Image

from .cases import DEGREES
from .client import FinishedPrompt
from .graphs import Job, sampling_graph
from .server import Server
from .test_kin import advanced

RING_2 = DEGREES["ring_2"]
SLOW = Job(family="flux_dev", cfg=2.0, size=(48, 48), steps=5)  # ComfyUI drops progress that comes too fast

Progress = dict[str, list[tuple[int, int]]]


def progress(run: FinishedPrompt) -> Progress:
    """(value, max) of each event, by node."""
    progress: Progress = defaultdict(list)
    for event in filter(lambda event: event.kind == "progress", run.events):
        progress[event.data["node"]].append((event.data["value"], event.data["max"]))
    return dict(progress)


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize("sampler", ["euler", "heun", "dpm_2", "uni_pc", "lcm", "dpm_adaptive", "seeds_3"])
def test_every_sampler_counts_as_in_comfyui(server: Server, sampler: str) -> None:
    job = replace(SLOW, sampler=sampler, size=(32, 32) if sampler == "dpm_adaptive" else SLOW.size)
    native = progress(server.client.run(sampling_graph(job, "KSampler")))
    ours = progress(server.client.run(sampling_graph(job, "CPSampler", RING_2)))
    assert list(ours) == list(native) == ["sampler"]
    check(ours["sampler"], native["sampler"])


def test_two_samplers_of_a_graph_count_each_for_itself(server: Server) -> None:
    native, ours = (progress(server.client.run(advanced(SLOW, parallel))) for parallel in (None, RING_2))
    assert list(ours) == list(native) == ["first", "sampler"]
    for node, events in ours.items():
        check(events, native[node])


def check(ours: list[tuple[int, int]], native: list[tuple[int, int]]) -> None:
    """The same total and the same end; steps that came too fast are left out on either side."""
    assert {total for _, total in ours} == {total for _, total in native}
    assert ours[-1] == native[-1]
    assert ours == sorted(ours)
    assert len(set(ours)) == len(ours) or len(set(native)) < len(native), "dpm_adaptive stays at its last step"
    assert len(ours) > 1


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize("method", ["latent2rgb", "taesd", "auto", "none"])
def test_previews_are_those_of_comfyui(server: Server, method: str) -> None:
    """There is no TAESD file here: ComfyUI falls back to latent2rgb, and so does CP Sampler."""
    native, ours = (
        server.client.run(sampling_graph(SLOW, sampler, parallel), preview_method=method)
        for sampler, parallel in (("KSampler", None), ("CPSampler", RING_2))
    )
    assert len(ours.previews) == len(native.previews) == (0 if method == "none" else SLOW.steps)
    for got, want in zip(ours.previews, native.previews, strict=True):
        assert (pixels(got) - pixels(want)).abs().max() <= 8, "of 255, after JPEG"


def pixels(image: bytes) -> torch.Tensor:
    picture = Image.open(io.BytesIO(image)).convert("RGB")
    return torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).short()
