"""A network that is cut by rows has both prompts side by side first; its rows are shared out where that is faster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from parallel_runtime.architectures.row_plan import RowLevel, sides_to_cut
from parallel_runtime.planning.candidates import candidates, default_plan
from parallel_runtime.planning.memory_model import Capacity
from parallel_runtime.planning.network_stats import NetworkStats
from parallel_runtime.planning.resolve import evaluate, resolve
from parallel_runtime.planning.run_plan import DeviceProfile, PlanInputs, RunPlan
from parallel_runtime.request import EngineOptions, ParallelRequest


def unet(name: str, heads: int, *levels: tuple[int, int, int, int]) -> NetworkStats:
    made = [RowLevel(weights=w, attentions=a, width=width, messages=m) for w, a, width, m in levels]
    weights, layers = sum(level.weights for level in made), sum(level.attentions for level in made)
    return NetworkStats(
        name=name, heads=heads, layers=layers, width=320, weights=weights, weight_bytes=2 * weights, item_bytes=2,
        step_cacheable=False, row_levels=tuple(made),
    )  # fmt: skip


SDXL = unet("SDXL", 10, (16_600_320, 0, 0, 11), (166_297_600, 10, 640, 17), (2_375_680_000, 60, 1280, 21))
SD15 = unet(
    "SD1.5", 8, (29_297_920, 5, 320, 16), (108_134_400, 5, 640, 17), (398_131_200, 5, 1280, 17),
    (321_454_080, 1, 1280, 16),
)  # fmt: skip
H100 = DeviceProfile(bytes_per_second=3e11, flops_per_second=2.0**49)
RTX = DeviceProfile(bytes_per_second=2e10, flops_per_second=2.0**47)


def inputs(
    network: NetworkStats, pixels: int, gpus: int, profile: DeviceProfile | None, *, prompts: int = 2, **more: Any
) -> PlanInputs:
    request, sequences = ParallelRequest(**more.pop("request", {})), more.pop("sequences", 1)
    side = pixels // 8
    work = network.work(sequences, side * side, prompts=prompts, recorded=True)
    work = replace(work, row_ranks=-(-side // 2 ** (len(network.row_levels) - 1)))
    return PlanInputs(
        request=request, network=network, gpus=gpus, guided=prompts > 1, work=work, profile=profile, **more,
    )  # fmt: skip


def shape(plan: RunPlan) -> tuple[int, int, int]:
    return plan.degrees.data_degree, plan.degrees.cfg_degree, plan.degrees.context_parallel_size


@pytest.mark.parametrize(
    ("network", "pixels", "gpus", "prompts", "profile", "wanted"),
    [
        (SDXL, 1024, 2, 2, H100, (1, 2, 1)),
        (SDXL, 1024, 4, 2, H100, (1, 2, 2)),
        (SDXL, 2048, 8, 2, H100, (1, 2, 4)),
        (SDXL, 1024, 2, 1, H100, (1, 1, 2)),
        (SDXL, 2048, 2, 1, RTX, (1, 1, 2)),
        (SDXL, 2048, 4, 2, RTX, (1, 2, 2)),
        (SD15, 512, 2, 1, H100, (2, 1, 1)),
        (SD15, 512, 4, 2, H100, (1, 2, 1)),
        (SDXL, 512, 4, 2, RTX, (1, 2, 1)),
        (SDXL, 1024, 4, 2, None, (1, 2, 1)),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_auto_shares_rows_out_where_they_pay(
    network: NetworkStats, pixels: int, gpus: int, prompts: int, profile: DeviceProfile | None, wanted: tuple[int, ...]
) -> None:
    assert shape(resolve(inputs(network, pixels, gpus, profile, prompts=prompts))) == wanted


@pytest.mark.parametrize("sequences", [1, 2, 4])
@pytest.mark.parametrize("gpus", [2, 3, 4, 8])
def test_auto_is_never_slower_than_without_rows(gpus: int, sequences: int) -> None:
    for network in (SDXL, SD15):
        for pixels in (64, 256, 512, 768, 1024, 2048):
            for profile in (H100, RTX):
                for prompts in (1, 2):
                    known = inputs(network, pixels, gpus, profile, prompts=prompts, sequences=sequences)
                    without = next(plan for plan in candidates(known) if plan.degrees.context_parallel_size == 1)
                    assert resolve(known).seconds <= evaluate(without, known).seconds


def test_auto_takes_as_many_workers_as_a_picture_has_rows() -> None:
    """On slow devices with fast links rows pay at any size; nine workers have nothing to do with two rows."""
    slow = DeviceProfile(bytes_per_second=1e10, flops_per_second=1e10)
    one_prompt_at_a_time: list[dict[str, Any]] = [{"batch_coupled": True}, {"request": {"cfg_degree": 1}}]
    cases = [(3, 1, {}, (1, 1, 2)), (9, 1, {}, (1, 1, 2)), (9, 2, {}, (1, 2, 2)), (5, 2, {}, (1, 2, 2))]
    cases += [(9, 2, more, (1, 1, 2)) for more in one_prompt_at_a_time]
    for gpus, prompts, more, wanted in cases:
        known = inputs(SD15, 128, gpus, slow, prompts=prompts, **more)
        assert known.work is not None
        assert known.work.row_ranks == 2
        plan = resolve(known)
        assert shape(plan) == wanted
        assert len(plan.left_out) == gpus - plan.degrees.world_size


@pytest.mark.parametrize(
    ("sides", "wanted"),
    [
        ((64, 64), [(-2, 8), (-1, 8)]),
        ((16, 40), [(-1, 5), (-2, 2)]),
        ((33, 4), [(-1, 1)]),  # columns of 4, 2, 1 and 1 do not tell the last levels apart
        ((4, 4), []),
    ],
    ids=str,
)
def test_a_side_is_cut_where_the_other_one_tells_the_levels_apart(
    sides: tuple[int, int], wanted: list[tuple[int, int]]
) -> None:
    assert sides_to_cut((1, 4, *sides), 3) == wanted


def test_all_devices_start_to_be_measured_and_those_that_idle_are_left_out() -> None:
    known = inputs(SD15, 512, 4, H100)
    assert default_plan(known).placement.devices == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    plan = resolve(known)
    assert plan.placement.devices == ("cuda:0", "cuda:1")
    assert plan.left_out == ("cuda:2", "cuda:3")


def test_degrees_that_somebody_asks_for_stay() -> None:
    asked = {"ring_degree": 2, "ulysses_degree": 2, "devices": "cuda:0,cuda:1,cuda:2,cuda:3"}
    plan = resolve(inputs(SD15, 512, 4, H100, request=asked))
    assert (plan.degrees.ring_degree, plan.degrees.ulysses_degree, plan.degrees.cfg_degree) == (2, 2, 1)


@pytest.mark.parametrize(("profile", "wanted"), [(H100, "allgather"), (RTX, "tokens")], ids=["fast link", "slow link"])
def test_a_ring_collects_keys_or_on_a_slow_link_the_tokens_that_they_are_made_of(
    profile: DeviceProfile, wanted: str
) -> None:
    asked = {"ring_degree": 2, "ulysses_degree": 1, "options": EngineOptions(rotate_method="auto")}
    known = inputs(SDXL, 1024, 2, profile, prompts=1, request=asked, capacity=Capacity(device_bytes=80 * 2**30))
    plan = resolve(known)
    assert plan.degrees.options.rotate_method == wanted
    passed = replace(plan, degrees=plan.degrees.with_options(rotate_method="alltoall"))
    assert evaluate(plan, known).seconds <= evaluate(passed, known).seconds


def test_a_picture_of_too_few_rows_takes_as_long_as_on_one_worker() -> None:
    """Eight rows of the last level are no work for nine workers: each computes all of it."""
    many = inputs(SD15, 512, 9, RTX, prompts=1, request={"ring_degree": 9, "ulysses_degree": 1})
    alone = inputs(SD15, 512, 1, RTX, prompts=1)
    assert many.work is not None
    assert many.work.row_ranks == 8
    assert resolve(many).seconds == pytest.approx(resolve(alone).seconds)
