"""What one rank knows all learn that are asked, and no others; nobody acts on it alone."""

from __future__ import annotations

import pytest

from .conftest import Groups

LARGE = 1 << 62


@pytest.mark.parametrize("speaker", [0, 3])
def test_a_vote_is_heard_by_the_ranks_that_are_asked_and_by_no_others(groups: Groups, speaker: int) -> None:
    answers = groups(4).run("tests.engine.vote_cases:votes", speaker=speaker)
    for rank, heard in enumerate(answers):
        assert heard["all"]
        assert heard["ring"] == (rank % 2 == speaker % 2)
        assert heard["ulysses"] == (rank // 2 == speaker // 2)


def test_numbers_of_63_bits_come_from_every_rank_in_their_order(groups: Groups) -> None:
    answers = groups(4).run("tests.engine.vote_cases:numbers")
    for rank, (of_all, of_ring, others) in enumerate(answers):
        assert of_all == [LARGE + other for other in range(4)]
        assert of_ring == [[other, LARGE + other] for other in (rank % 2, rank % 2 + 2)]
        assert others == [2]


def test_what_one_rank_refuses_its_ring_refuses_and_nobody_else(groups: Groups) -> None:
    answers = groups(4).run("tests.engine.vote_cases:refusals")
    assert answers == [[], ["file.gone"], [], ["elsewhere"]]


def test_a_vote_of_gpus_is_no_waiting_of_theirs(groups: Groups) -> None:
    assert groups(2).run("tests.engine.vote_cases:waiting") == [[False, True]] * 2


def test_no_rank_closes_the_weights_in_its_memory_before_all_have_mapped_them(groups: Groups) -> None:
    assert groups(2).run("tests.engine.vote_cases:mapped_late") == [[1.0, 1.0, 1.0]] * 2
