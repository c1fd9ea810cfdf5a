"""A plan that lacks a word is refused, or what it lacks was not needed: nothing wrong gets through."""

from __future__ import annotations

import pytest

from ..engine.conftest import Groups

EXACT = 1e-5
# Between them these inputs use every word of every plan.
CASES = [
    "flux residuals and references",
    "flux 2 references at time zero",
    "flux redux",
    "chroma residuals",
    "wan 5b",
    "wan vace",
    "wan camera",
    "qwen image mask",
    "qwen image edit 2511",
    "z-image references",
    "lumina 2",
    "sd3.5 medium",
    "hunyuan video mask",
    "hunyuan video i2v, guiding frame",
    "hunyuan video residuals of both kinds",
    "ltx-video, a time for each token",
    "ltx-2, a time for each frame",
    "cosmos predict2, a time for each frame",
    "hidream i1",
    "kandinsky 5",
    "omnigen 2 references",
    "boogu references",
    "ernie image",
    "krea 2 references at time zero",
    "joyimage references",
    "cogvideox",
    "lens",
    "wan animate",
    "wan s2v with motion",
    "humo",
    "wandancer",
    "wandancer, all of the dance",
    "chroma radiance",
    "aura flow",
    "pixart",
    "hunyuan dit residuals",
    "hunyuan 3d",
    "hunyuan 3d 2.1",
    "mage-flow references",
    "z-image in pixels",
    "ideogram 4, padded",
    "pid",
    "cosmos 1",
    "mochi",
    "minimax h3 masks",
    "hidream o1",
    "hidream o1, a later step",
    "stable audio 3",
    "ace-step 1.5",
    "minimax music, two windows",
    "triposplat",
]


@pytest.mark.sweep(one_in=12)
@pytest.mark.parametrize("name", CASES)
def test_nothing_wrong_gets_through_a_plan_with_one_word_less(networks: Groups, name: str) -> None:
    for answer in networks(2).run("tests.architectures.mutations:survivors", name=name):
        wrong = {what: error for what, error in answer["let through"].items() if not error <= EXACT}
        assert not wrong
        assert answer["refused"] >= 5
