"""A step cache skips on several ranks what it skips on one, and computes the same; blocks that write into their input
and residuals between blocks do not mislead it."""

from __future__ import annotations

import pytest

from ..engine.conftest import Groups
from ..zoo.calls import CASES

EXACT = 1e-5
CACHED = [
    "flux", "flux residuals", "chroma", "wan", "wan vace", "qwen image", "z-image", "sd3.5 medium", "hunyuan video",
    "ltx-video", "ltx-2", "cosmos predict2", "hidream i1", "omnigen 2", "boogu", "lens", "krea 2",
    "joyimage references",
]  # fmt: skip


@pytest.mark.sweep(one_in=5)
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("name", CACHED)
def test_the_same_evaluations_are_skipped(networks: Groups, name: str, ring: int, ulysses: int) -> None:
    assert name in CASES
    where = "tests.architectures.caching_cases:cached"
    for answer in networks(ring * ulysses).run(where, name=name, ring=ring, ulysses=ulysses):
        assert answer["skipped"] == answer["together"]
        assert answer["skipped"][:3] == [False, True, False]
        assert answer["error"] <= EXACT


def test_evaluations_with_replaced_blocks_skip_nothing(networks: Groups) -> None:
    assert networks(1).run("tests.architectures.caching_cases:replaced") == [[True, True]]


def test_cards_that_come_to_other_decisions_skip_what_all_would(networks: Groups) -> None:
    assert networks(2).run("tests.architectures.caching_cases:unlike") == [{"skipped": [False] * 5}] * 2
