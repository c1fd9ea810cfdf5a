"""ComfyUI's networks compute the same in the stages of a pipeline: to the bit, one forward at a time and in flight."""

from __future__ import annotations

import pytest

from ..engine.conftest import Groups
from ..zoo.calls import CASES

WHERE = "tests.architectures.stage_cases:parity"
SAME, EXACT = 1e-6, 1e-5  # kernels may round otherwise where what they read lies elsewhere; where others attend
REFUSED = {
    "hidream o1": "0 blocks make no 2 stages",
    "hidream o1, a later step": "0 blocks make no 2 stages",
    "hunyuan dit residuals": "keep for later blocks",
}
CUT = [name for name in CASES if name not in REFUSED]


@pytest.mark.sweep(one_in=19)
@pytest.mark.parametrize("case", CUT)
@pytest.mark.parametrize("stages", [2, 3])
def test_in_stages(networks: Groups, stages: int, case: str) -> None:
    answers = networks(stages).run(WHERE, name=case, stages=stages)
    assert max(max(answer["alone"], answer["in flight"]) for answer in answers) <= SAME
    assert {answer["left"] for answer in answers} == {0.0}, "something is left behind"
    assert len({answer["bits"] for answer in answers}) == 1, "ranks differ"
    assert sum(answer["held"] for answer in answers) == pytest.approx(1.0), "a block has no stage, or two"


@pytest.mark.sweep(one_in=24)
@pytest.mark.parametrize("case", CUT)
def test_in_stages_of_two_that_share_a_sequence(networks: Groups, case: str) -> None:
    answers = networks(4).run(WHERE, name=case, stages=2, ulysses=2)
    assert [answer["peers"] for answer in answers] == [[0, 2], [1, 3]] * 2, "of two machines each is a stage"
    assert max(max(answer["alone"], answer["in flight"]) for answer in answers) <= EXACT
    assert {answer["left"] for answer in answers} == {0.0}, "something is left behind"
    assert len({answer["bits"] for answer in answers}) == 1, "ranks differ"


def test_the_bits_are_those_of_one_process(networks: Groups) -> None:
    for answer in networks(2).run(WHERE, name="flux", stages=2):
        assert (answer["alone"], answer["in flight"]) == (0.0, 0.0)


@pytest.mark.parametrize("case", list(REFUSED))
def test_refused_by_name(networks: Groups, case: str) -> None:
    messages = networks(2).run("tests.architectures.stage_cases:refusal", name=case)
    assert all(REFUSED[case] in words for words in messages)


def test_what_one_stage_refuses_all_do_and_the_next_forward_is_right(networks: Groups) -> None:
    answers = networks(3).run("tests.architectures.stage_cases:refused_by_one", name="flux")
    assert sorted(answer["said"] for answer in answers) == [*["another worker refused"] * 2, "no more"]
    assert [answer["error"] for answer in answers] == [0.0] * 3


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize("case", ["hunyuan dit", "wan vace", "pid", "omnigen 2 references", "hidream o1"])
def test_nothing_wrong_gets_through_a_plan_without_a_word_on_stages(networks: Groups, case: str) -> None:
    for answer in networks(2).run("tests.architectures.stage_cases:with_one_word_less", name=case):
        assert answer
        assert all(result in ("refused", float("inf")) or result <= SAME for result in answer.values()), "not even NaN"


def test_a_network_that_gives_nan_gives_it_in_stages_too(networks: Groups) -> None:
    """As KSampler does, which returns a black picture: on all ranks the same, one forward at a time and in flight."""
    for answer in networks(2).run("tests.architectures.stage_cases:with_nan", name="flux"):
        assert answer == [True, True]
