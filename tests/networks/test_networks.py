"""ComfyUI's networks compute the same on several ranks as on one: odd sizes, batches, references, masks, residuals."""

from __future__ import annotations

import pytest

from ..engine.conftest import Groups
from .zoo import CASES

EXACT = 1e-5


def check(networks: Groups, case: str, ring: int, ulysses: int) -> None:
    answers = networks(ring * ulysses).run("tests.networks.cases:parity", name=case, ring=ring, ulysses=ulysses)
    assert max(answer["error"] for answer in answers) <= EXACT
    assert {answer["left"] for answer in answers} == {0.0}, "undivide leaves something behind"
    assert len({answer["bits"] for answer in answers}) == 1, "ranks differ"


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("case", list(CASES))
def test_three_ranks_in_a_ring(networks: Groups, case: str) -> None:
    check(networks, case, 3, 1)


@pytest.mark.sweep(one_in=5)
@pytest.mark.parametrize("case", list(CASES))
def test_two_ranks_in_a_ring(networks: Groups, case: str) -> None:
    check(networks, case, 2, 1)


@pytest.mark.sweep(one_in=4)
@pytest.mark.parametrize("case", list(CASES))
def test_two_ranks_of_ulysses(networks: Groups, case: str) -> None:
    check(networks, case, 1, 2)


@pytest.mark.sweep(one_in=6)
@pytest.mark.parametrize("case", list(CASES))
def test_two_by_two_ranks(networks: Groups, case: str) -> None:
    check(networks, case, 2, 2)


@pytest.mark.sweep(one_in=40)
@pytest.mark.parametrize("case", list(CASES))
def test_more_ranks_of_ulysses_than_heads(networks: Groups, case: str) -> None:
    check(networks, case, 1, 4)
