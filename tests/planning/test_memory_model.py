"""Where weights shall be: whole where that fits, else what is predicted to be fastest, and never more than fits."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from parallel_runtime.errors import Refused
from parallel_runtime.explain.plan_words import why_replicated
from parallel_runtime.planning.memory_model import (
    ACTIVATION_RESERVE_TENSORS,
    UNFILLED_SHARE,
    UNLIMITED,
    Capacity,
    MemoryModel,
    estimate_activation_bytes,
)
from parallel_runtime.planning.network_stats import NetworkStats
from parallel_runtime.planning.resolve import resolve
from parallel_runtime.planning.run_plan import DeviceProfile, RunPlan
from parallel_runtime.request import ParallelRequest
from parallel_runtime.specs import Parallelism, WeightPlacement

from .memory_cases import Case, decide, estimated

GIB = 2**30
QWEN = NetworkStats(
    name="Qwen-Image", heads=24, layers=60, width=3072, weights=20 * 10**9, weight_bytes=40 * GIB, item_bytes=2,
    blocks=(39 * GIB // 60,) * 60,
)  # fmt: skip
SLOW_LINKS = DeviceProfile(bytes_per_second=1e10, flops_per_second=1.4e14, host_bytes_per_second=2e10)
FAST_LINKS = replace(SLOW_LINKS, bytes_per_second=3e11)


def case(
    device: float | None, *, host: float | None = 128, workers: int = 2, link: DeviceProfile | None = SLOW_LINKS
) -> Case:
    capacity = Capacity(
        device_bytes=None if device is None else int(device * GIB), host_bytes=None if host is None else int(host * GIB)
    )
    return Case(work=QWEN.work(1, 7000), degrees=Parallelism(ulysses_degree=workers), capacity=capacity, profile=link)


def test_what_fits_is_whole():
    for device in (None, 80.0, 42.0):
        assert decide("auto", case(device)).weights == WeightPlacement()


@pytest.mark.parametrize("device", [6.0, 8.0, 16.0, 24.0, 32.0, 39.0])
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("link", [None, SLOW_LINKS, FAST_LINKS])
def test_what_is_chosen_fits_and_one_block_more_would_not(device: float, workers: int, link: DeviceProfile | None):
    asked = case(device, workers=workers, link=link)
    try:
        plan = decide("auto", asked)
    except Refused:
        for mode in ("offload", "shard"):
            assert not asked.memory.allows(mode) or not asked.memory.fits(WeightPlacement(mode=mode))
        return
    assert estimated(plan).fits
    assert plan.weights.mode != "replicate"
    more = replace(plan.weights, resident_blocks=plan.weights.resident_blocks + 1)
    assert not asked.memory.fits(more) or plan.weights.resident_blocks == 60 - 3


def test_the_faster_source_is_chosen():
    def chosen(link: DeviceProfile, tokens: int) -> str:
        asked = case(24.0, workers=4, link=link)
        return decide("auto", replace(asked, work=replace(asked.work, tokens=tokens))).weights.mode

    assert chosen(SLOW_LINKS, 500) == "offload"
    assert chosen(FAST_LINKS, 500) == "shard"
    assert chosen(FAST_LINKS, 50_000) == "offload", "where both are hidden"


def test_prompts_share_the_workers_where_only_that_finds_weights_a_place_or_shortens_the_wait():
    def pays(device: float | None, tokens: int = 7000, workers: int = 2, **more: Any) -> bool:
        asked = case(device, **more)
        asked = replace(asked, work=replace(asked.work, tokens=tokens, prompts=2))
        inputs = replace(asked.inputs(), request=ParallelRequest(), gpus=workers, live=None)
        try:
            return resolve(inputs).degrees.cfg_degree == 1
        except Refused:
            return False

    assert not pays(None), "it fits as a whole"
    assert pays(28.0, host=8), "half of the workers have no place for it"
    assert not pays(4.0, host=8), "nor have all of them"
    assert pays(24.0, 500, link=FAST_LINKS), "fetching from main memory takes longer than computing"
    assert not pays(24.0, 500, link=SLOW_LINKS), "and from the other worker as long"
    assert not pays(24.0, 50_000, link=FAST_LINKS), "hidden behind what is computed"
    assert not pays(28.0, host=8, workers=4), "two could share it, in each half"
    assert not pays(24.0, link=None), "nothing was measured"


def test_without_main_memory_for_one_copy_weights_are_in_parts():
    assert decide("auto", case(24.0, host=8, workers=4)).weights.mode == "shard"


def test_a_worker_alone_has_measured_no_link_and_needs_none():
    alone = case(None, workers=1, link=replace(SLOW_LINKS, bytes_per_second=0.0))
    assert decide("auto", alone).weights == WeightPlacement()


def test_one_worker_has_nobody_to_share_with():
    asked = case(24.0, workers=1)
    plan = decide("shard", asked)
    assert plan.weights.mode == "replicate"
    assert why_replicated(ParallelRequest(weights="shard"), plan, QWEN).endswith(
        "there is one worker, so it has all weights of Qwen-Image."
    )
    branches = decide("shard", replace(asked, degrees=Parallelism(cfg_degree=2)))
    assert "set cfg_degree and data_degree to 1" in why_replicated(ParallelRequest(weights="shard"), branches, QWEN)
    assert not why_replicated(ParallelRequest(), plan, QWEN)
    assert not why_replicated(ParallelRequest(weights="offload"), decide("offload", asked), QWEN)
    assert decide("auto", case(24.0, workers=1, link=FAST_LINKS)).weights.mode == "offload"


def test_a_network_without_blocks_is_whole_or_refused():
    asked = case(24.0)
    asked = replace(asked, work=replace(asked.work, network=replace(QWEN, blocks=())))
    assert decide("offload", asked).weights.mode == "replicate"
    with pytest.raises(Refused, match="does not fit"):
        decide("auto", asked)


def test_what_a_setting_has_limited_names_the_setting_and_numbers_that_say_something():
    asked = case(24.0)
    tiny = replace(QWEN, blocks=(), weight_bytes=28 << 20)
    limited = replace(asked.capacity, device_bytes=4 << 20, limited_by="CP_MEMORY_GIB")
    asked = replace(asked, work=replace(asked.work, network=tiny), capacity=limited)
    with pytest.raises(
        Refused, match=r"28\.0 MiB of weights.*4\.0 MiB of its device \(CP_MEMORY_GIB says so\).*or raise CP_"
    ):
        decide("auto", asked)


def test_asked_for_by_name_as_little_is_held_as_can_be():
    for mode in ("shard", "offload"):
        assert decide(mode, case(None)).weights == WeightPlacement(mode=mode, resident_blocks=0)


@pytest.mark.parametrize(
    ("device", "host", "tokens", "remedy"),
    [
        (4.5, 128.0, 400_000, "1/(2|4|8|16) of the pixels"),
        (0.5, 0.0, 7000, "smaller model"),
    ],
)
def test_what_fits_nowhere_is_refused_with_numbers_and_the_nearest_that_does(device, host, tokens, remedy):
    asked = case(device, host=host)
    asked = replace(asked, work=replace(asked.work, tokens=tokens))
    may_take = math.floor(10 * (1 - UNFILLED_SHARE) * device) / 10
    with pytest.raises(Refused, match=rf"40.0 GiB of weights.*at least .* GiB.*{may_take} GiB of its.*{remedy}"):
        decide("auto", asked)


@pytest.mark.parametrize(("device", "host", "remedy"), [(13.5, 4.0, "fp8"), (8.0, 0.0, r"\d workers")])
def test_where_main_memory_is_what_lacks_the_refusal_says_so(device: float, host: float, remedy: str) -> None:
    with pytest.raises(Refused, match=rf"40.0 GiB of weights.*{remedy}") as refused:
        decide("auto", case(device, host=host))
    sizes = str(refused.value).partition("picture")[2]
    may_use, fetched, free = map(float, re.findall(r"(?:use|so|has) ([\d.]+) GiB", sizes.replace("0.0 MiB", "0.0 GiB")))
    assert may_use == math.floor(10 * (1 - UNFILLED_SHARE) * device) / 10
    assert (free, fetched > free) == (host, True)


def test_what_the_workers_have_stays_where_another_is_hardly_better():
    asked = case(24.0)
    best = decide("auto", asked).weights
    near, far = (replace(best, resident_blocks=best.resident_blocks - less) for less in (3, 20))
    assert decide("auto", asked, before=near).weights == near
    assert decide("auto", asked, before=far).weights == best
    assert decide("auto", asked, before=replace(best, resident_blocks=best.resident_blocks + 1)).weights == best, (
        "it does not fit"
    )


def test_prompts_are_evaluated_one_by_one_where_both_at_once_have_no_room():
    def in_one_batch(device: float) -> RunPlan:
        asked = case(device)
        asked = replace(asked, work=replace(asked.work, tokens=100_000, sequences=3, prompts=2))
        plans = [decide(choice, asked) for choice in ("replicate", "auto")]
        assert plans[0] == plans[1]
        return plans[0]

    needed = max(estimate_activation_bytes(QWEN.work(3, 100_000), Parallelism(ulysses_degree=2))) / GIB
    assert in_one_batch(40 + 2.1 * needed).entries_per_call == 0
    assert in_one_batch(40 + 1.5 * needed).entries_per_call == 3


def test_weights_are_in_parts_only_where_one_prompt_at_a_time_has_no_room_beside_whole_ones():
    def chosen(device: float, prompts: int) -> tuple[str, int]:
        asked = case(device)
        plan = decide("auto", replace(asked, work=replace(asked.work, tokens=100_000, prompts=prompts)))
        return plan.weights.mode, plan.entries_per_call

    needed = max(estimate_activation_bytes(QWEN.work(1, 100_000), Parallelism(ulysses_degree=2))) / GIB
    assert chosen(40 + 1.1 * needed, 1) == ("replicate", 0)
    assert chosen(40 + 1.1 * needed, 2) == ("replicate", 1)
    assert chosen(40 + 0.9 * needed, 2) == ("offload", 0)
    assert chosen(1.7 * needed, 2) == ("offload", 1)


def test_a_worker_alone_is_told_what_would_work_by_a_link_that_it_has_not():
    alone = case(12.0, workers=1, link=replace(SLOW_LINKS, bytes_per_second=0.0))
    with pytest.raises(Refused, match=r"Qwen-Image does not fit: .* 2 workers on as many devices would fit"):
        decide("auto", replace(alone, work=replace(alone.work, tokens=100_000)))


@pytest.mark.parametrize("missing", [1, 2**10, 2**24, 2**30])
def test_what_is_needed_and_what_there_is_never_read_alike(missing: int):
    asked = case(None, workers=1, host=0)
    budget = (min(asked.memory.needed_bytes_by_rank(WeightPlacement(mode="offload"))) - missing) / (1 - UNFILLED_SHARE)
    with pytest.raises(Refused) as refused:
        decide("auto", replace(asked, capacity=Capacity(device_bytes=int(budget), host_bytes=0)))
    needs, may_use = re.findall(r"(?:needs at least|may use) ([\d.]+ GiB)", str(refused.value))[:2]
    assert needs != may_use


def test_each_rank_has_room_to_encode_a_picture_where_that_takes_more_than_its_tokens():
    encoding = replace(QWEN, encode_bytes=3 * GIB)
    for degrees, tokens in (Parallelism(ulysses_degree=4), 7000), (Parallelism(), 700_000):
        plain, with_vae = (
            MemoryModel(work=network.work(1, tokens), degrees=degrees, capacity=UNLIMITED).activation_bytes_by_rank
            for network in (QWEN, encoding)
        )
        assert with_vae == tuple(max(3 * GIB, size) for size in plain)
    assert plain == with_vae, "more tokens than the picture needs"


def test_control_nets_weights_are_on_every_rank_and_their_residuals_split_like_the_tokens():
    controlled = replace(QWEN, weight_bytes=QWEN.weight_bytes + 2 * GIB, residuals=60)

    def more(rows: int, degrees: Parallelism) -> tuple[set[int], set[int]]:
        """Of activations, in tensors of one row, and of weights."""
        models = [
            MemoryModel(work=network.work(rows, 7000), degrees=degrees, capacity=UNLIMITED)
            for network in (QWEN, controlled)
        ]
        plain, with_them = (model.activation_bytes_by_rank for model in models)
        sequence_bytes = models[0].work.sequence_bytes
        weights = [model.weight_bytes_by_rank(WeightPlacement()) for model in models]
        return (
            {(after - before) / sequence_bytes for before, after in zip(plain, with_them, strict=True)},
            {after - before for before, after in zip(*weights, strict=True)},
        )

    each = ACTIVATION_RESERVE_TENSORS + 60
    assert more(1, Parallelism()) == ({each}, {2 * GIB})
    assert more(1, Parallelism(ulysses_degree=4)) == ({each / 4}, {2 * GIB})
    assert more(2, Parallelism(ulysses_degree=4)) == ({each / 2}, {2 * GIB})
    assert more(2, Parallelism(data_degree=2, ulysses_degree=2)) == ({each / 2}, {2 * GIB})
