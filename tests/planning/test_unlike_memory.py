"""Cards of unlike memory: each holds what it has room for, and CP Plan says what, and why."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from parallel_runtime.errors import Refused
from parallel_runtime.explain.plan_report import Subject
from parallel_runtime.planning.memory_model import (
    SIMILAR_RATIO,
    UNFILLED_SHARE,
    Capacity,
    estimate_activation_bytes,
)
from parallel_runtime.planning.network_stats import shares_within
from parallel_runtime.planning.run_plan import RunPlan
from parallel_runtime.specs import Parallelism, WeightPlacement

from ..explain.reports import report
from .memory_cases import Case, decide, estimated, needed, weight_bytes
from .test_memory_model import FAST_LINKS, GIB, QWEN, SLOW_LINKS


def unlike(*budgets: float, host: float | None = 128.0, **degrees: int) -> Case:
    """Of a model of 40 GiB, on cards with so many GiB of room."""
    bytes_ = None if host is None else int(host * GIB)
    capacity = Capacity.of_each([int(budget * GIB) for budget in budgets], host_bytes=bytes_)
    asked = Parallelism(**(degrees or {"ulysses_degree": len(budgets)}))
    return Case(work=QWEN.work(1, 7000), degrees=asked, capacity=capacity, profile=SLOW_LINKS)


def drawn(dice: random.Random) -> Case:
    """Two to four cards, and shares that need not be as their rooms are."""
    budgets = [dice.choice((6.0, 10.0, 11.5, 16.0, 24.0, 32.0, 48.0)) for _ in range(dice.randint(2, 4))]
    asked = unlike(*budgets, host=dice.choice((4.0, 20.0, 128.0)))
    shares = tuple(dice.randint(1, 5) for _ in budgets) if dice.random() < 0.5 else ()
    work = replace(asked.work, tokens=dice.choice((500, 7000, 60_000)), prompts=dice.choice((1, 2)))
    link = dice.choice((None, SLOW_LINKS, FAST_LINKS))
    return replace(asked, degrees=replace(asked.degrees, shares=shares), work=work, profile=link)


def test_what_is_chosen_fits_every_card_and_uses_what_each_has() -> None:
    dice, seen = random.Random(23), set()
    for _ in range(600):
        asked = drawn(dice)
        try:
            plan = decide("auto", asked)
        except Refused:
            continue
        seen.add((plan.weights.mode, bool(plan.weights.resident_blocks_by_rank or plan.weights.shard_shares)))
        usable = 1.0 if plan.weights.mode == "replicate" else 1 - UNFILLED_SHARE
        at_once = asked.memory.with_one_prompt_per_batch if plan.entries_per_call else asked.memory
        for rank, (budget, size) in enumerate(zip(asked.memory.budget_bytes_by_rank, needed(plan), strict=True)):
            assert budget is not None
            assert size <= usable * budget
            if plan.weights.resident_blocks_by_rank:
                more = list(plan.weights.resident_blocks_by_rank)
                more[rank] += 1
                one = WeightPlacement(mode="offload", resident_blocks=min(more), resident_blocks_by_rank=tuple(more))
                enough = plan.weights.resident_blocks_on(rank) >= len(QWEN.blocks) - 3
                assert enough or not at_once.fits(one), "each has as many as it has room for"
    assert {("offload", True), ("shard", True), ("replicate", False)} <= seen


def test_parts_go_by_what_is_free_beside_all_else_and_are_alike_on_like_cards() -> None:
    asked = unlike(48.0, 24.0, 13.0)
    plan = decide("shard", asked)
    assert plan.weights.mode == "shard"
    workspace = estimated(plan).workspace_bytes_by_rank
    others = QWEN.weight_bytes - sum(QWEN.blocks)
    budgets = asked.memory.budget_bytes_by_rank
    free = [
        (1 - UNFILLED_SHARE) * (budget or 0) - others - more for budget, more in zip(budgets, workspace, strict=True)
    ]
    parts = plan.weights.shard_shares
    for part, budget in zip(parts, free, strict=True):
        assert part / sum(parts) == pytest.approx(budget / sum(free), abs=0.01)
    assert weight_bytes(plan) == tuple(sorted(set(weight_bytes(plan)), reverse=True))
    assert decide("shard", unlike(24.0, 24.0)).weights == WeightPlacement(mode="shard")
    assert decide("shard", unlike(32.0, 32.0 / SIMILAR_RATIO + 0.1)).weights == WeightPlacement(mode="shard"), (
        "hardly apart"
    )


def test_groups_have_parts_of_their_own() -> None:
    asked = unlike(48.0, 24.0, 24.0, 48.0, cfg_degree=2, ulysses_degree=2)
    first, second, third, fourth = weight_bytes(decide("shard", asked))
    assert first == fourth > second == third
    assert first + second == pytest.approx(2 * QWEN.weight_bytes - sum(QWEN.blocks), rel=0.001)


def test_a_model_that_fits_the_larger_card_only_is_whole_there_and_fetched_on_the_other() -> None:
    plan = decide("auto", unlike(48.0, 16.0))
    assert plan.weights.mode == "offload"
    assert plan.weights.resident_blocks_by_rank[0] == 60, "all of its blocks"
    assert 0 < plan.weights.resident_blocks_by_rank[1] < 30
    assert weight_bytes(plan)[1] < 16 * GIB
    without_main_memory = decide("auto", unlike(48.0, 16.0, host=1.0)).weights
    assert without_main_memory.mode == "shard"
    assert without_main_memory.shard_shares[0] > without_main_memory.shard_shares[1]


def test_what_each_computes_needs_memory_by_its_own_share() -> None:
    asked = unlike(48.0, 16.0)
    by_shares = replace(asked, degrees=replace(asked.degrees, shares=(3, 1)))
    full = max(estimate_activation_bytes(asked.work, Parallelism()))
    assert estimate_activation_bytes(asked.work, by_shares.degrees) == (full * 3 // 4, full // 4)
    at_home = decide("auto", by_shares).weights.resident_blocks_on(1)
    assert at_home >= decide("auto", asked).weights.resident_blocks_on(1)
    work = replace(asked.work, tokens=100_000)
    long, mostly_small = (
        decide(
            "auto", replace(asked, work=work, degrees=replace(asked.degrees, shares=shares))
        ).weights.resident_blocks_on(1)
        for shares in ((4, 1), (3, 2))
    )
    assert long > mostly_small, "fewer tokens leave room for blocks"


def test_images_that_a_group_has_more_of_need_more_memory_there() -> None:
    degrees, work = Parallelism(data_degree=2, shares=(3, 1)), QWEN.work(8, 7000)
    first, second = estimate_activation_bytes(work, degrees)
    assert (first, second) == (6 * max(estimate_activation_bytes(QWEN.work(1, 7000), Parallelism())), first // 3)


def test_what_the_workers_have_stays_where_a_little_more_or_less_is_free() -> None:
    for choice, budgets in (("auto", (48.0, 16.0)), ("auto", (24.0, 12.0)), ("shard", (24.0, 12.0))):
        before = decide(choice, unlike(*budgets)).weights
        for less in (0.2, 0.4):
            again = decide(choice, unlike(*(budget + less for budget in budgets)), before=before)
            assert again.weights == before
    far = decide("auto", unlike(48.0, 24.0), before=decide("auto", unlike(48.0, 12.0)).weights)
    assert far.weights == decide("auto", unlike(48.0, 24.0)).weights


def test_the_numbers_of_a_refusal_are_those_of_the_card_that_lacks_most() -> None:
    with pytest.raises(Refused, match=r"Each worker needs at least .* GiB and may use 1\.8 GiB of its device"):
        decide("auto", unlike(24.0, 2.0))


@pytest.mark.parametrize(
    ("total", "budgets", "shares"),
    [
        (20, (80, 12), ()),
        (30, (80, 12), (18, 12)),
        (30, (None, 12), (18, 12)),
        (90, (80, 20, 30), (40, 20, 30)),
        (100, (40, 20), (2, 1)),
        (10, (40, -5), (1, 0)),
        (10, (-1, 0), ()),
        (10, (None, None), ()),
    ],
)
def test_rows_of_a_picture_are_fewer_where_there_is_too_little_memory_for_as_many(
    total: int, budgets: tuple[int | None, ...], shares: tuple[int, ...]
) -> None:
    made = shares_within(total, budgets)
    assert len(made) == len(shares)
    for one, want in zip(made, shares, strict=True):
        assert one / sum(made) == pytest.approx(want / sum(shares), abs=0.01)


def report_text(asked: Case, plan: RunPlan) -> str:
    subject = Subject(model="Qwen-Image", latent=(1, 16, 128, 128), tokens={"image": 7000}, work=asked.work)
    free = [budget or 0 for budget in asked.memory.budget_bytes_by_rank]
    return report(
        subject, plan, guided=False, automatic=False, capacity=asked.capacity, free=free, profile=asked.profile
    ).text


def test_the_plan_says_what_each_card_holds_and_why() -> None:
    asked = unlike(48.0, 16.0)
    text = report_text(asked, decide("auto", asked))
    assert "Weights: offload, by the memory of each worker; blocks on the device: cuda:0 40.0 " in text
    assert "cuda:0 40.0 GiB (60/60), cuda:1 " in text
    assert "All weights fit on cuda:0 only: cuda:1 would need 4" in text
    assert "and has 16.0 GiB for them" in text
    assert "/ 48.0 GiB, cuda:1 " in text
    assert "Too little memory" not in text
    alike = unlike(24.0, 24.0)
    assert "by the memory of each" not in report_text(alike, decide("auto", alike))


def test_the_picture_shows_parts_as_large_as_they_are() -> None:
    asked = unlike(24.0, 12.0, 18.0)
    plan = decide("shard", asked)
    subject = Subject(model="Qwen-Image", latent=(1, 16, 128, 128), tokens={"image": 7000}, work=asked.work)
    shown = report(subject, plan, guided=False, automatic=False, capacity=asked.capacity).parts
    (start, first), (second, third), (fourth, end) = (part.weights for part in shown)
    assert (start, round(end, 6)) == (0, 1)
    assert first >= second
    assert third >= fourth
    assert first - start > end - fourth > third - second
