"""ComfyUI's text encoders compute the same, to the bit, in stages on several ranks, or with blocks that are fetched."""

from __future__ import annotations

import pytest

from ..engine.conftest import Groups
from ..zoo.encoder_classes import ENCODERS

WHERE = "tests.architectures.encoder_cases"


@pytest.mark.parametrize("name", ENCODERS)
def test_in_two_stages(networks: Groups, name: str) -> None:
    answers = networks(2).run(f"{WHERE}:in_stages", name=name, stages=[3], layers=[None, -2, 1])
    assert all(answer["equal"] for answer in answers)
    assert all(0.02 < answer["held"] < 0.98 for answer in answers)


def test_the_layers_of_flux_2_are_those_of_all_stages(networks: Groups) -> None:
    answers = networks(2).run(f"{WHERE}:in_stages", name="mistral", stages=[3], layers=[[1, 3, 5], "all"])
    assert all(answer["equal"] for answer in answers)


@pytest.mark.parametrize("name", ["umt5xxl", "clip_l", "gemma3"])
def test_in_three_unequal_stages_and_no_weight_is_in_two(networks: Groups, name: str) -> None:
    answers = networks(3).run(f"{WHERE}:in_stages", name=name, stages=[1, 3])
    assert all(answer["equal"] for answer in answers)
    assert 1 <= sum(answer["held"] for answer in answers) < 1.1


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["clip_l", "t5base"])
def test_in_two_stages_at_full_size(networks: Groups, name: str) -> None:
    answers = networks(2).run(f"{WHERE}:in_stages", name=name, stages=[7], full_size=True)
    assert all(answer["equal"] for answer in answers)


def test_a_block_that_fails_is_refused_on_all_ranks_which_go_on(networks: Groups) -> None:
    for answer in networks(2).run(f"{WHERE}:failing"):
        assert "KeyError('missing')" in answer["refused"]
        assert answer["finite"]


@pytest.mark.parametrize("resident", [0, 2])
@pytest.mark.parametrize("name", ["t5xxl", "qwen3", "clip_g"])
def test_one_rank_fetches_blocks_while_others_do_nothing(networks: Groups, name: str, resident: int) -> None:
    assert all(answer["equal"] for answer in networks(2).run(f"{WHERE}:fetched", name=name, resident=resident))
