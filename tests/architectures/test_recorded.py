"""ComfyUI's networks, recorded: by tape, which gets wrong what a CUDA graph would, alone and cut for several ranks."""

from __future__ import annotations

import pytest

from ..engine.conftest import Groups
from ..zoo.calls import CASES

BY_VALUES = (
    "hidream i1",  # which experts a token goes to
    "hunyuan 3d 2.1",
    "hidream o1",  # where the text's tokens are
    "hidream o1, a later step",  # whose keys are kept
    "ideogram 4, padded",  # which tokens are padding
    "minimax h3",  # the time
    "minimax h3 masks",
    "minimax h3 keyframes",
    "minimax h3 references",
    "ace-step 1.5",  # which voices there are
)

IN_A_RING = "flux redux, hidden pairs"  # the CPU leaves out a block that is hidden from all


def check(networks: Groups, case: str, ring: int, ulysses: int) -> None:
    answers = networks(ring * ulysses).run(
        "tests.architectures.recorded_cases:replayed", name=case, ring=ring, ulysses=ulysses
    )
    for answer in answers:
        assert answer["replayed"] == answer["eager"], answer["reasons"]
        assert len(set(answer["eager"])) == 2, "the inputs are alike"
        if case in BY_VALUES or (ring > 1 and case == IN_A_RING):
            assert answer["replays"] == 0
            assert any("reads on the host" in reason or "another worker" in reason for reason in answer["reasons"])
        else:
            assert (answer["replays"], answer["reasons"]) == (2, [])


@pytest.mark.sweep(one_in=10)
@pytest.mark.parametrize("case", list(CASES))
def test_alone(networks: Groups, case: str) -> None:
    check(networks, case, 1, 1)


def test_what_decides_by_values_stays_eager(networks: Groups) -> None:
    check(networks, "hidream i1", 1, 1)
    check(networks, "hidream i1", 1, 2)


@pytest.mark.sweep(one_in=20)
@pytest.mark.parametrize("case", list(CASES))
def test_two_ranks_in_a_ring(networks: Groups, case: str) -> None:
    check(networks, case, 2, 1)


@pytest.mark.sweep(one_in=30)
@pytest.mark.parametrize("case", list(CASES))
def test_three_ranks_in_a_ring(networks: Groups, case: str) -> None:
    check(networks, case, 3, 1)


@pytest.mark.sweep(one_in=20)
@pytest.mark.parametrize("case", list(CASES))
def test_two_ranks_of_ulysses(networks: Groups, case: str) -> None:
    check(networks, case, 1, 2)


@pytest.mark.sweep(one_in=30)
@pytest.mark.parametrize("case", list(CASES))
def test_two_by_two_ranks(networks: Groups, case: str) -> None:
    check(networks, case, 2, 2)
