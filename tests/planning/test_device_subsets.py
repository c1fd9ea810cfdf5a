"""Unlike cards: a run takes all of them, or leaves out those that hold the others up, whatever is sooner."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from parallel_runtime.architectures.network_modules import Load
from parallel_runtime.explain.plan_words import compared
from parallel_runtime.planning.candidates import default_plan
from parallel_runtime.planning.memory_model import Capacity
from parallel_runtime.planning.network_stats import NetworkStats, Work
from parallel_runtime.planning.resolve import MIN_GAIN_TO_SWITCH, ranked, resolve
from parallel_runtime.planning.run_plan import DeviceProfile, PlanInputs, RunPlan, Speed
from parallel_runtime.planning.seconds import single_worker_seconds
from parallel_runtime.request import ParallelRequest
from parallel_runtime.specs import Placement

from .test_share_balance import FAST, SLOW

GIB = 2**30
FLUX = NetworkStats(
    name="FLUX", heads=24, layers=57, width=3072, weights=12 * 10**9, weight_bytes=24 * 10**9, item_bytes=2,
    blocks=(4 * 10**8,) * 57, loads=(Load(4 * 10**8),) * 57,
)  # fmt: skip
WORK = FLUX.work(1, 4608, recorded=True)
CRAWLING = Speed(products=4e12, attention=3e12)


def wish(gpus: int, **request: object) -> PlanInputs:
    return PlanInputs(request=ParallelRequest.of(request), network=FLUX, gpus=gpus, guided=True)  # type: ignore[arg-type]


def link(*ranks: Speed, speed: float = 2e10) -> DeviceProfile:
    slowest = min(rank.products for rank in ranks)
    return DeviceProfile(bytes_per_second=speed, flops_per_second=slowest, host_bytes_per_second=2e10, ranks=ranks)


def capacity_of(*gib: float, host: float = 128.0) -> Capacity:
    return Capacity.of_each([int(one * GIB) for one in gib], host_bytes=int(host * GIB))


def plans_of(
    wish: PlanInputs, work: Work, known: DeviceProfile | None, capacity: Capacity, live: Placement | None = None
) -> list[RunPlan]:
    """What is taken, then all others."""
    return ranked(replace(wish, work=work, profile=known, capacity=capacity, live=live))


def on_all(plans: list[RunPlan]) -> RunPlan:
    return next(plan for plan in plans if not plan.left_out)


def devices(plan: RunPlan) -> tuple[str, ...]:
    return plan.placement.devices


@pytest.mark.parametrize("count", [2, 3, 4])
def test_like_cards_are_all_used_and_nothing_is_compared(count: int) -> None:
    plans = plans_of(wish(count), WORK, link(*[FAST] * count), capacity_of(*[80.0] * count))
    assert not any(plan.left_out for plan in plans)
    assert compared(plans) == ()


OPEN = [{}, {"pipeline_degree": 0}]  # a CP Parallel Config with its defaults, and a sampler without one


@pytest.mark.parametrize("request_", OPEN, ids=str)
def test_a_card_that_only_holds_the_others_up_is_left_out_and_all_ways_are_told_with_their_seconds(
    request_: dict[str, object],
) -> None:
    work, known = replace(WORK, prompts=2), link(FAST, CRAWLING, FAST, speed=2e8)
    plans = plans_of(wish(3, **request_), work, known, capacity_of(80, 80, 80))
    best = plans[0]
    assert "cuda:1" in best.left_out
    assert best.seconds < MIN_GAIN_TO_SWITCH * on_all(plans).seconds
    text = " ".join(compared(plans))
    assert f"Estimated {best.seconds:.2f} s per evaluation of all prompts" in text
    assert f"all devices, the tokens by shares, {on_all(plans).seconds:.2f} s" in text
    assert "Auto does not use" in text
    assert "To use them, name all devices" in text


def test_a_slower_card_that_helps_stays() -> None:
    work = replace(WORK, prompts=2)
    plans = plans_of(wish(2), work, link(FAST, SLOW), capacity_of(80, 80))
    best = plans[0]
    assert devices(best) == ("cuda:0", "cuda:1")
    assert best.degrees.cfg_degree == 1, "a prompt for each would wait for the slower"
    text = " ".join(compared(plans))
    halves = next(plan for plan in plans if plan.degrees.cfg_degree == 2)
    without = next(plan for plan in plans if plan.left_out == ("cuda:1",))
    assert f"a prompt for each half of the workers {halves.seconds:.2f} s" in text
    assert f"without cuda:1 {without.seconds:.2f} s" in text
    assert "Auto leaves" not in text


def drawn(dice: random.Random) -> tuple[PlanInputs, Work, DeviceProfile]:
    count = dice.randint(2, 4)
    speeds = [replace(FAST, products=FAST.products / dice.choice((1, 1, 1.5, 3, 20))) for _ in range(count)]
    known = link(*speeds, speed=dice.choice((1e9, 1e10, 1e11)))
    work = replace(WORK, tokens=dice.choice((1000, 4608, 40_000)), prompts=dice.choice((1, 2)))
    capacity = capacity_of(
        *(dice.choice((8.0, 16.0, 32.0, 80.0)) for _ in range(count)), host=dice.choice((4.0, 128.0))
    )
    return replace(wish(count), work=work, profile=known, capacity=capacity), work, known


@pytest.mark.sweep(one_in=5)
@pytest.mark.parametrize("part", range(5))
def test_what_is_taken_is_the_best_to_an_estimates_noise_and_stays(part: int) -> None:
    dice, left_out, nowhere = random.Random(7), 0, 0
    draws = [drawn(dice) for _ in range(150)]
    for inputs, work, known in draws[part::5]:
        plans = ranked(inputs)
        best = plans[0]
        least = min(plan.seconds for plan in plans)
        assert best.seconds * MIN_GAIN_TO_SWITCH <= least or best.seconds == math.inf
        assert devices(ranked(replace(inputs, live=best.placement))[0]) == devices(best), "what is there stays"
        for plan in plans:
            stays = ranked(replace(inputs, live=plan.placement))[0]
            assert stays.seconds * MIN_GAIN_TO_SWITCH <= plan.seconds
        if len(devices(best)) == 1 and math.isfinite(best.seconds):
            rank = int(devices(best)[0].removeprefix("cuda:"))
            alone = work.prompts * single_worker_seconds(work, known.ranks[rank])
            assert best.seconds >= 0.95 * alone, "no card is faster than it measured"
        left_out += bool(best.left_out)
        nowhere += any(plan.seconds == math.inf for plan in plans)
    assert 2 < left_out < 28
    assert nowhere


@pytest.mark.parametrize("request_", OPEN, ids=str)
def test_a_card_without_room_for_its_part_of_a_model_is_left_out_before_anything_was_measured(
    request_: dict[str, object],
) -> None:
    plans = plans_of(wish(2, **request_), WORK, None, capacity_of(80.0, 0.5))
    best = plans[0]
    assert on_all(plans).seconds == math.inf
    assert devices(best) == ("cuda:0",)
    text = " ".join(compared(plans))
    assert text.startswith("Nothing is measured yet; with all devices the weights do not fit. Auto does not use cuda:1")


@pytest.mark.parametrize("request_", OPEN, ids=str)
def test_a_small_card_that_would_have_the_weights_offloaded_is_left_out(request_: dict[str, object]) -> None:
    one_prompt = replace(wish(3, **request_), guided=False)
    best = plans_of(one_prompt, WORK, link(FAST, FAST, FAST), capacity_of(80, 6, 80, host=64))[0]
    assert best.left_out == ("cuda:1",)
    assert best.weights.mode == "replicate"


def test_a_model_that_fits_the_larger_card_only_is_where_it_is_soonest() -> None:
    for speed, both in ((3e11, True), (1e8, False)):
        one_prompt = replace(wish(2), guided=False)
        plans = plans_of(
            one_prompt, replace(WORK, tokens=40_000), link(FAST, FAST, speed=speed), capacity_of(80.0, 16.0)
        )
        best = plans[0]
        assert (len(devices(best)) == 2) == both
        assert best.weights.mode == ("replicate" if not both else "offload")
        assert len(plans) > 1


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
    assert not asked.automatic_devices
    plans = plans_of(asked, replace(WORK, prompts=2), known, capacity_of(80.0, 80.0))
    assert {plan.placement for plan in plans} == {default_plan(asked).placement}
    for name in ("ring_degree", "ulysses_degree", "cfg_degree", "data_degree"):
        if request_.get(name):
            assert getattr(plans[0].degrees, name) == request_[name]


EQUAL = [  # FLOP/s in products and in attention, bytes/s between two, GPUs
    pytest.param(150e12, 130e12, 5e9, 2, id="2 x 4090, 5 GB/s"),
    pytest.param(150e12, 130e12, 10e9, 2, id="2 x 4090, 10 GB/s"),
    pytest.param(210e12, 180e12, 20e9, 2, id="2 x 5090"),
    pytest.param(65e12, 55e12, 3e9, 4, id="4 x 3090, 3 GB/s"),
    pytest.param(65e12, 55e12, 6e9, 4, id="4 x 3090, 6 GB/s"),
    pytest.param(560e12, 400e12, 300e9, 8, id="8 x H100"),
]


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("tokens", [1536, 4608], ids=["512 px", "1024 px"])
@pytest.mark.parametrize(("products", "attention", "link", "gpus"), EQUAL)
def test_equal_gpus_are_no_slower_than_one(
    products: float, attention: float, link: float, gpus: int, tokens: int, recorded: bool
) -> None:
    network = NetworkStats(name="FLUX", heads=24, layers=57, width=3072, weights=11_900_000_000)
    work, speed = network.work(1, tokens, recorded=recorded), Speed(products=products, attention=attention)

    def seconds(count: int) -> float:
        profile = DeviceProfile(
            bytes_per_second=link if count > 1 else 0.0,
            flops_per_second=products,
            ranks=(speed,) * count,
        )
        inputs = PlanInputs(request=ParallelRequest(), network=network, gpus=count, work=work, profile=profile)
        chosen = resolve(inputs)
        assert chosen.placement.world_size == count, "no worker starts or ends for it"
        return chosen.seconds

    assert seconds(gpus) <= 1.05 * seconds(1)


@pytest.mark.parametrize("coupled", [{"batch_coupled": True}, {"images_coupled": True}], ids=str)
def test_where_images_are_seen_together_one_gpu_is_a_candidate_too(coupled: dict[str, bool]) -> None:
    """No group of workers can repeat what the others compute there."""
    network = replace(FLUX, images_coupled="images_coupled" in coupled)
    asked = replace(wish(2), guided=False, network=network, batch_coupled="batch_coupled" in coupled)
    plans = plans_of(asked, network.work(1, 1536), link(FAST, FAST, speed=1e9), capacity_of(80.0, 80.0))
    assert devices(plans[0]) == ("cuda:0",)
    assert plans[0].seconds < MIN_GAIN_TO_SWITCH * on_all(plans).seconds


@pytest.mark.parametrize("shares", ["3,2", "3,2,1"])
def test_shares_of_a_vae_refuse_no_run_of_a_network_that_is_not_divided(shares: str) -> None:
    undivided = FLUX.undivided("SDXL")
    asked = replace(wish(3, shares=shares, devices="0,1,2"), network=undivided)
    best = plans_of(asked, undivided.work(1, 4608, prompts=2), link(FAST, FAST, FAST), capacity_of(80, 80, 80))[0]
    assert devices(best) == ("cuda:0", "cuda:1")
    assert best.degrees.shares == ()
