"""ComfyUI's networks over ranks of unequal shares: exact, recorded and replayed to the bit, and cached alike."""

from __future__ import annotations

from math import prod

import pytest

from ..engine.conftest import Groups
from ..zoo.calls import CASES
from .test_networks import EXACT
from .test_recorded import BY_VALUES

Degrees = tuple[int, int, tuple[int, ...]]  # ring, Ulysses, shares

DEGREES: list[Degrees] = [(3, 1, (1, 4, 2)), (1, 2, (3, 2)), (2, 2, (5, 3, 1, 2)), (1, 3, (2, 0, 1)), (2, 1, (1, 0))]


@pytest.mark.sweep(one_in=34)
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("case", list(CASES))
def test_networks_are_exact(networks: Groups, case: str, degrees: Degrees) -> None:
    ring, ulysses, shares = degrees
    call = {"name": case, "ring": ring, "ulysses": ulysses, "shares": shares}
    answers = networks(prod(degrees[:2])).run("tests.architectures.cases:parity", **call)
    assert max(answer["error"] for answer in answers) <= EXACT
    assert len({answer["bits"] for answer in answers}) == 1, "ranks differ"


@pytest.mark.sweep(one_in=48)
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case not in BY_VALUES and "hidden" not in case])
def test_recorded_networks_replay_the_same_bits(networks: Groups, case: str, degrees: Degrees) -> None:
    ring, ulysses, shares = degrees
    call = {"name": case, "ring": ring, "ulysses": ulysses, "shares": shares}
    for answer in networks(prod(degrees[:2])).run("tests.architectures.recorded_cases:replayed", **call):
        assert answer["replayed"] == answer["eager"], answer["reasons"]
        assert (answer["replays"], answer["reasons"]) == (2, [])


@pytest.mark.parametrize("degrees", DEGREES[:2], ids=str)
@pytest.mark.parametrize("case", ["flux", "ltx-2"])
def test_a_step_cache_skips_what_one_process_skips(networks: Groups, case: str, degrees: Degrees) -> None:
    ring, ulysses, shares = degrees
    call = {"name": case, "ring": ring, "ulysses": ulysses, "shares": shares}
    for answer in networks(prod(degrees[:2])).run("tests.architectures.caching_cases:cached", **call):
        assert answer["together"] == answer["skipped"]
        assert answer["error"] <= EXACT
