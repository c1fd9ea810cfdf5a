"""Networks compute the same, to the bit, with weights that are fetched just before they are needed, and poisoned after:
what reads them at any other time gets no number."""

from __future__ import annotations

import pytest

from ..engine.conftest import Groups
from ..zoo.calls import CASES

WHERE = "tests.architectures.weight_cases:parity"
OUTSIDE = {"ltx-2": 0.35}  # much of the tiny one lies outside its blocks: the connectors of its texts


@pytest.mark.sweep(one_in=12)
@pytest.mark.parametrize("case", list(CASES))
def test_sharded_over_a_ring_of_two(networks: Groups, case: str) -> None:
    for answer in networks(2).run(WHERE, name=case, mode="shard", ring=2):
        assert answer["equal"]
        assert answer["held"] < 0.62


@pytest.mark.sweep(one_in=24)
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("mode", ["offload", "staged"])
def test_in_main_memory_once(networks: Groups, mode: str, case: str) -> None:
    for answer in networks(2).run(WHERE, name=case, mode=mode, ulysses=2):
        assert answer["equal"]
        assert answer["held"] < OUTSIDE.get(case, 0.25)
        assert bool(answer["fetches"]) == (mode == "staged"), "on the CPU they are there already"


@pytest.mark.sweep(one_in=40)
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize(("ring", "ulysses"), [(3, 1), (2, 2)])
def test_sharded_over_three_and_four(networks: Groups, ring: int, ulysses: int, case: str) -> None:
    for answer in networks(ring * ulysses).run(WHERE, name=case, mode="shard", ring=ring, ulysses=ulysses):
        assert answer["equal"]


def test_every_block_is_fetched_once_an_evaluation(networks: Groups) -> None:
    (answer,) = networks(1).run(WHERE, name="chroma", mode="staged")
    assert answer["equal"]
    assert answer["fetches"] == 2 * (19 + 38)


@pytest.mark.parametrize("mode", ["shard", "staged"])
@pytest.mark.parametrize(("name", "runs_again"), [("wan vace", 2), ("wan animate", 0), ("pid", 0)])
def test_blocks_of_two_stacks_that_take_turns_are_fetched_once_an_evaluation(
    networks: Groups, name: str, runs_again: int, mode: str
) -> None:
    """In the first one each stack may take the other's buffers. Two contexts of VACE run its blocks twice, which are
    poisoned between."""
    for answer in networks(2).run(WHERE, name=name, mode=mode, ring=2):
        assert answer["equal"]
        assert answer["later fetches"] == answer["modules"] + runs_again


def test_resident_blocks_are_not_fetched(networks: Groups) -> None:
    (answer,) = networks(1).run(WHERE, name="chroma", mode="staged", residents=[40])
    assert answer["equal"]
    assert answer["fetches"] == 2 * (19 + 38 - 40)


@pytest.mark.sweep(one_in=40)
@pytest.mark.parametrize("case", list(CASES))
def test_in_parts_as_large_as_each_has_room_for(networks: Groups, case: str) -> None:
    answers = networks(3).run(WHERE, name=case, mode="shard", ring=3, parts=[5, 1, 2])
    assert all(answer["equal"] for answer in answers)
    first, second, third = (answer["held"] for answer in answers)
    assert second < third < first


@pytest.mark.parametrize("mode", ["offload", "staged"])
def test_each_rank_keeps_as_many_blocks_as_it_has_room_for(networks: Groups, mode: str) -> None:
    """Also all of them, and the others fetch what it has written for them."""
    kept = [57, 40, 0, 11]
    answers = networks(4).run(WHERE, name="chroma", mode=mode, ulysses=4, residents=kept)
    assert all(answer["equal"] for answer in answers)
    assert [answer["fetches"] for answer in answers] == [2 * (57 - one) * (mode == "staged") for one in kept]
    shares = [answer["held"] for answer in answers]
    assert shares[0] == 1
    assert shares[0] > shares[1] > shares[3] > shares[2]


@pytest.mark.parametrize("mode", ["shard", "staged"])
@pytest.mark.parametrize("case", ["flux", "qwen image"])
def test_no_rank_ever_holds_more_than_its_share_two_blocks_and_a_weight(networks: Groups, case: str, mode: str) -> None:
    for answer in networks(2).run("tests.architectures.weight_cases:peak", name=case, mode=mode):
        assert answer["share"] < 0.55
        assert answer["peak"] <= answer["bound"] + 64 * 1024


@pytest.mark.parametrize("case", ["flux", "wan"])
def test_fsdp2_agrees(networks: Groups, case: str) -> None:
    assert max(networks(2).run("tests.architectures.weight_cases:judged", name=case)) <= 1e-5
