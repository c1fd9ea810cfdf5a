"""What `auto` makes of the speed of each worker: shares in proportion once a rank is behind twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from parallel_runtime.explain.plan_words import compared
from parallel_runtime.planning.candidates import candidates
from parallel_runtime.planning.network_stats import NetworkStats, Work, in_proportion
from parallel_runtime.planning.resolve import alternatives, resolve
from parallel_runtime.planning.run_plan import DeviceProfile, PlanInputs, Speed
from parallel_runtime.planning.seconds import ShareBalance
from parallel_runtime.request import ParallelRequest
from parallel_runtime.specs import ModelSpec, Parallelism, Placement

MODEL = ModelSpec(loader="flux")
TWO = Parallelism(ulysses_degree=2)
WORK = NetworkStats(name="FLUX", heads=24, layers=57, width=3072, weights=10**10, weight_bytes=20, item_bytes=2).work(
    1, 4608
)


def balance() -> ShareBalance:
    return ShareBalance(Placement(devices=("cuda:0", "cuda:1")))


def shares_of(of: ShareBalance, degrees: Parallelism, model: ModelSpec = MODEL) -> tuple[int, ...]:
    """Those of the next run, which begins."""
    known = of.shares(model).get(degrees, ())
    of.begin(model, replace(degrees, shares=known))
    return known


def run(of: ShareBalance, degrees: Parallelism, speeds: Sequence[float], overhead: float = 0.0) -> tuple[int, ...]:
    """The shares of the next run after one in which ranks of these speeds computed, a little besides."""
    degrees = replace(degrees, shares=shares_of(of, degrees))
    shares = degrees.shares or (1,) * len(speeds)
    of.learn(MODEL, degrees, [overhead + share / sum(shares) / v for share, v in zip(shares, speeds, strict=True)])
    return shares_of(of, replace(degrees, shares=()))


def test_after_two_runs_a_rank_of_half_the_speed_has_a_third() -> None:
    group = balance()
    assert run(group, TWO, (1, 0.5)) == (), "once may be chance"
    slow, fast = reversed(run(group, TWO, (1, 0.5)))
    assert slow / (slow + fast) == pytest.approx(1 / 3, abs=0.005)
    settled = shares_of(group, TWO)
    assert [run(group, TWO, (1, 0.5)) for _ in range(5)] == [settled] * 5


@pytest.mark.parametrize("speeds", [(1, 1), (1, 0.94), (1, 1.05, 0.97)])
def test_what_is_hardly_apart_changes_nothing(speeds: tuple[float, ...]) -> None:
    group, degrees = balance(), Parallelism(ring_degree=len(speeds))
    assert {run(group, degrees, speeds) for _ in range(5)} == {()}


def test_a_rank_has_to_be_behind_twice_in_a_row() -> None:
    group = balance()
    assert {run(group, TWO, speeds) for speeds in [(1, 0.5), (1, 1)] * 3} == {()}


def test_what_does_not_grow_with_a_share_is_approached_in_some_runs_and_settles() -> None:
    group, degrees = balance(), Parallelism(ring_degree=3)
    seen = [run(group, degrees, (1, 0.5, 0.25), overhead=0.1) for _ in range(20)]
    assert len(set(seen[-8:])) == 1
    shares = seen[-1]
    seconds = [0.1 + share / sum(shares) / v for share, v in zip(shares, (1, 0.5, 0.25), strict=True)]
    assert max(seconds) <= 1.06 * sum(seconds) / 3


def test_shares_that_were_tried_do_not_take_turns() -> None:
    """Whole heads: whatever the shares, one rank has two of three, and is behind."""
    group, seen = balance(), []
    for _ in range(20):
        shares = shares_of(group, TWO)
        fewer = [1.0, 2.2] if shares and shares[0] < shares[1] else [2.0, 1.0]
        group.learn(MODEL, replace(TWO, shares=shares), fewer)
        seen.append(shares)
    assert len(set(seen)) > 1
    assert len(set(seen[6:])) == 1
    assert seen[-1] == (), "the better one"


@pytest.mark.parametrize("seconds", [(0.2, None), (0.002, 0.004), ()], ids=["not said", "too short to tell", "nothing"])
def test_what_says_nothing_teaches_nothing(seconds: tuple[float | None, ...]) -> None:
    group = balance()
    for _ in range(3):
        group.learn(MODEL, TWO, seconds)
    assert shares_of(group, TWO) == ()


def test_shares_that_somebody_chose_teach_nothing_of_those_that_auto_has() -> None:
    group = balance()
    for _ in range(3):
        group.learn(MODEL, replace(TWO, shares=(9, 1)), [0.9, 0.1])
    run(group, TWO, (1, 1))
    assert shares_of(group, TWO) == ()


def test_each_model_and_division_has_its_own() -> None:
    group = balance()
    for _ in range(2):
        run(group, TWO, (1, 0.5))
    assert shares_of(group, TWO, replace(MODEL, patches_fingerprint="a LoRA")) == shares_of(group, TWO) != ()
    assert shares_of(group, TWO, replace(MODEL, loader="wan")) == ()
    assert shares_of(group, Parallelism(ring_degree=2)) == ()


def test_groups_of_prompts_have_as_much_to_do_whatever_their_shares() -> None:
    """The second group's ranks are half as fast, and so it takes twice as long: within each group all is well."""
    group, degrees = balance(), Parallelism(ulysses_degree=2, cfg_degree=2)
    assert shares_of(group, degrees) == ()
    for _ in range(2):
        group.learn(MODEL, degrees, [1.0, 1.0, 2.0, 2.0])
    first, second, third, fourth = shares_of(group, degrees)
    assert first == second
    assert third == fourth


FAST, SLOW = Speed(products=1.6e14, attention=1.2e14), Speed(products=0.8e14, attention=0.4e14)


def at_first(*speeds: Speed, work: Work = WORK, devices: str = "0,1", **request: object) -> tuple[int, ...]:
    """The shares of the first run on two devices that measured these speeds."""
    profile = DeviceProfile(bytes_per_second=1e10, flops_per_second=1e14, ranks=speeds)
    asked = ParallelRequest.of({"ring_degree": 1, "ulysses_degree": 2, "devices": devices, **request})
    plan, *_ = candidates(PlanInputs(request=asked, network=work.network, gpus=2, work=work, profile=profile))
    return plan.degrees.shares


def test_unlike_cards_start_by_what_they_measured_of_products_and_attention() -> None:
    first, second = at_first(FAST, SLOW)
    assert 0.6 < first / (first + second) < 0.75
    long = at_first(FAST, SLOW, work=replace(WORK, tokens=200_000))
    assert long[0] / sum(long) == pytest.approx(0.75, abs=0.02), "nearly all of it attention"


@pytest.mark.parametrize(
    "speeds", [(FAST, FAST), (FAST, replace(FAST, products=1.45e14)), (FAST, Speed(products=1e13, attention=0)), ()]
)
def test_like_cards_and_such_that_measured_nothing_start_alike(speeds: tuple[Speed, ...]) -> None:
    assert at_first(*speeds) == ()


def test_workers_on_one_device_start_alike() -> None:
    assert at_first(FAST, SLOW, devices="cpu,cpu") == ()


def test_parts_are_whole_and_nobody_goes_without() -> None:
    assert in_proportion((1, 1, 1)) == (1, 1, 1)
    assert in_proportion((1000, 1)) == (128, 1)
    assert in_proportion((3, 2)) == (77, 51)


GUIDED = replace(WORK, prompts=2)
LINK = DeviceProfile(bytes_per_second=1e10, flops_per_second=1e14, ranks=(FAST, SLOW))


def inputs(link: DeviceProfile = LINK, **request: object) -> PlanInputs:
    asked = ParallelRequest.of(request)
    return PlanInputs(request=asked, network=GUIDED.network, gpus=2, guided=True, work=GUIDED, profile=link)


def sentence_of(link: DeviceProfile, **request: object) -> str:
    plan = resolve(inputs(link, **request))
    return " ".join(compared((plan, *alternatives(inputs(link, **request), plan))))


def test_two_prompts_on_unlike_cards_wait_for_the_slower() -> None:
    apart = resolve(inputs(cfg_degree=2))
    in_one_batch, *_ = (plan for plan in alternatives(inputs(cfg_degree=2), apart) if not plan.left_out)
    assert in_one_batch.seconds < 0.9 * apart.seconds
    assert resolve(inputs()).degrees.cfg_degree == 1
    assert resolve(inputs(replace(LINK, ranks=(FAST, FAST)))).degrees.cfg_degree == 2
    assert resolve(inputs(shares="equal")).degrees.cfg_degree == 2, "as it was asked for"


def test_the_plan_tells_what_the_other_ways_would_take() -> None:
    text = sentence_of(LINK, ring_degree=2)
    assert "a prompt for each half of the workers" in text
    assert "without cuda:1" in text
    assert "all devices, the tokens by shares" in sentence_of(LINK, cfg_degree=2)
    assert sentence_of(replace(LINK, ranks=(FAST, FAST)), ring_degree=2) == ""


def test_a_card_that_only_holds_the_others_up_is_advised_against() -> None:
    crawling = replace(LINK, bytes_per_second=1e8, ranks=(FAST, Speed(products=4e12, attention=3e12)))
    assert "name the others in devices to leave cuda:1 out" in sentence_of(crawling, ring_degree=2)
