"""Unlike cards: a run takes all of them, or leaves out those that hold the others up, whatever is sooner."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from parallel_runtime.host.choosing import CLEARLY, Staffing, Way, in_words, may_leave_out, ways
from parallel_runtime.host.cost import Figures, Link, Speed, Work, alone_seconds
from parallel_runtime.host.planning import Wish, plan
from parallel_runtime.host.storing import Capacity
from parallel_runtime.specs import ParallelRequest, Placement

from .test_balance import FAST, SLOW

GIB = 2**30
FLUX = Figures(
    name="FLUX", heads=24, layers=57, width=3072, weights=12 * 10**9, weight_bytes=24 * 10**9, item_bytes=2,
    blocks=(4 * 10**8,) * 57,
)  # fmt: skip
WORK = FLUX.work(1, 4608, recorded=True)
CRAWLING = Speed(products=4e12, attention=3e12)


def wish(gpus: int, **request: object) -> Wish:
    return Wish(request=ParallelRequest(**request), heads=24, gpus=gpus, guided=True)  # type: ignore[arg-type]


def link(*ranks: Speed, speed: float = 2e10) -> Link:
    slowest = min(rank.products for rank in ranks)
    return Link(bytes_per_second=speed, flops_per_second=slowest, host_bytes_per_second=2e10, ranks=ranks)


def rooms(*gib: float, host: float = 128.0) -> Capacity:
    return Capacity.of_each([int(one * GIB) for one in gib], host_bytes=int(host * GIB))


def taken(found: list[Way], live: Placement | None = None) -> Way:
    return Staffing().best(found, live)


def devices(way: Way) -> tuple[str, ...]:
    return way.division.placement.devices


@pytest.mark.parametrize("count", [2, 3, 4])
def test_like_cards_are_all_used_and_nothing_is_compared(count: int) -> None:
    found = ways(wish(count), WORK, link(*[FAST] * count), rooms(*[80.0] * count))
    assert len(found) == 1
    assert in_words(found, taken(found)) == ()


def test_a_card_that_only_holds_the_others_up_is_left_out_and_all_ways_are_told_with_their_seconds() -> None:
    work, known = replace(WORK, prompts=2), link(FAST, CRAWLING, FAST, speed=2e8)
    found = ways(wish(3), work, known, rooms(80, 80, 80))
    best = taken(found)
    assert "cuda:1" in best.without
    assert best.seconds < CLEARLY * found[0].seconds
    said = " ".join(in_words(found, best))
    assert f"Estimated {best.seconds:.2f} s for an evaluation of all prompts" in said
    assert f"all devices, the tokens by shares, {found[0].seconds:.2f} s" in said
    assert "Auto leaves out" in said
    assert "to use all the same, name all devices" in said


def test_a_slower_card_that_helps_stays() -> None:
    work = replace(WORK, prompts=2)
    found = ways(wish(2), work, link(FAST, SLOW), rooms(80, 80))
    best = taken(found)
    assert devices(best) == ("cuda:0", "cuda:1")
    assert best.division.degrees.cfg_degree == 1, "a prompt for each would wait for the slower"
    said = " ".join(in_words(found, best))
    halves, without = (next(way for way in found if way.wish.request.cfg_degree == 2), found[-1])
    assert f"a prompt for each half of the workers {halves.seconds:.2f} s" in said
    assert f"without cuda:1 {without.seconds:.2f} s" in said
    assert "Auto leaves" not in said


def drawn(dice: random.Random) -> tuple[list[Way], Work, Link]:
    count = dice.randint(2, 4)
    speeds = [replace(FAST, products=FAST.products / dice.choice((1, 1, 1.5, 3, 20))) for _ in range(count)]
    known = link(*speeds, speed=dice.choice((1e9, 1e10, 1e11)))
    work = replace(WORK, tokens=dice.choice((1000, 4608, 40_000)), prompts=dice.choice((1, 2)))
    capacity = rooms(*(dice.choice((8.0, 16.0, 32.0, 80.0)) for _ in range(count)), host=dice.choice((4.0, 128.0)))
    return ways(wish(count), work, known, capacity), work, known


def test_what_is_taken_is_the_best_to_an_estimates_noise_and_stays() -> None:
    dice, left_out, nowhere = random.Random(7), 0, 0
    for _ in range(150):
        found, work, known = drawn(dice)
        best = taken(found)
        least = min(way.seconds for way in found)
        assert best.seconds * CLEARLY <= least or best.seconds == math.inf
        assert devices(taken(found, best.division.placement)) == devices(best), "what is there stays"
        for way in found:
            stays = taken(found, way.division.placement)
            assert stays.seconds * CLEARLY <= way.seconds
        if len(devices(best)) == 1 and math.isfinite(best.seconds):
            rank = int(devices(best)[0].removeprefix("cuda:"))
            alone = work.prompts * alone_seconds(work, known.ranks[rank])
            assert best.seconds >= 0.95 * alone, "no card is faster than it measured"
        left_out += bool(best.without)
        nowhere += any(way.seconds == math.inf for way in found)
    assert 10 < left_out < 140
    assert nowhere


def test_a_card_without_room_for_its_part_of_a_model_is_left_out_before_anything_was_measured() -> None:
    found = ways(wish(2), WORK, None, rooms(80.0, 0.5))
    best = taken(found)
    assert found[0].seconds == math.inf
    assert devices(best) == ("cuda:0",)
    said = " ".join(in_words(found, best))
    assert said.startswith(
        "Nothing is measured yet; with all devices the weights have no place. Auto leaves out cuda:1"
    )


def test_a_model_that_fits_the_larger_card_only_is_where_it_is_soonest() -> None:
    for speed, both in ((3e11, True), (1e8, False)):
        one_prompt = replace(wish(2), guided=False)
        found = ways(one_prompt, replace(WORK, tokens=40_000), link(FAST, FAST, speed=speed), rooms(80.0, 16.0))
        best = taken(found)
        assert (len(devices(best)) == 2) == both
        assert best.division.storage.mode == ("replicate" if not both else "offload")
        assert len(found) > 1


@pytest.mark.parametrize(
    "request_",
    [
        {"ring_degree": 2, "ulysses_degree": 1},
        {"ulysses_degree": 2},
        {"cfg_degree": 2},
        {"cfg_degree": 1},
        {"devices": "0,1"},
        {"shares": "equal"},
        {"shares": "3,2"},
        {"data_degree": 2},
        {"pipeline_degree": 2},
    ],
    ids=str,
)
def test_what_a_user_has_chosen_is_never_overridden(request_: dict[str, object]) -> None:
    asked, known = wish(2, **request_), link(FAST, CRAWLING, speed=2e8)
    assert not may_leave_out(asked)
    found = ways(asked, replace(WORK, prompts=2), known, rooms(80.0, 80.0))
    assert [way.division.placement for way in found] == [plan(asked).placement]
    for name in ("ring_degree", "ulysses_degree", "cfg_degree", "data_degree"):
        if request_.get(name):
            assert getattr(found[0].division.degrees, name) == request_[name]


def test_what_auto_used_last_is_known_to_whoever_starts_workers_ahead() -> None:
    staffing, known = Staffing(), link(FAST, CRAWLING, FAST, speed=2e8)
    everybody = plan(wish(3)).placement
    assert staffing.usual(everybody) == everybody
    staffing.learn(everybody, known)
    assert staffing.measured(everybody) == known
    found = ways(wish(3), WORK, staffing.measured(everybody), rooms(80, 80, 80))
    best = staffing.best(found, everybody)
    assert staffing.usual(everybody) == best.division.placement != everybody
