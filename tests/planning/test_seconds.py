"""The arithmetic behind `auto` says what one H100 measured (2026-11-22), and chooses what follows from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from parallel_runtime.architectures.row_plan import RowLevel
from parallel_runtime.engine.attention.ring_and_ulysses import MIN_HIDDEN_BYTES
from parallel_runtime.planning.memory_model import (
    ALL_GATHERED_SHARE,
    Capacity,
    MemoryModel,
    estimate_activation_bytes,
)
from parallel_runtime.planning.network_stats import NetworkStats, Work
from parallel_runtime.planning.resolve import resolve
from parallel_runtime.planning.run_plan import DeviceProfile, PlanInputs
from parallel_runtime.planning.seconds import (
    TWO_WAVES_BYTES,
    attention_seconds,
    evaluation_seconds,
    rotate_method_for,
    times_as_fast,
)
from parallel_runtime.request import EngineOptions, ParallelRequest
from parallel_runtime.specs import Parallelism

FLUX = NetworkStats(
    name="FLUX", heads=24, layers=57, width=3072, weights=11_900_000_000, weight_bytes=23_800_000_000, item_bytes=2
)
# Ten of its forty blocks.
WAN = NetworkStats(
    name="Wan", heads=40, layers=10, width=5120, weights=3_600_000_000, weight_bytes=7_200_000_000, item_bytes=2
)
IMAGE, VIDEO = 4096 + 512, 32760
NO_WIRES = DeviceProfile(bytes_per_second=1e18, flops_per_second=2.0**49)
NVLINK = DeviceProfile(bytes_per_second=2.5e11, flops_per_second=2.0**49)
FREE_BYTES = 75 << 30
CLOSE = 1.15


def milliseconds(work: Work, ring: int = 1, ulysses: int = 1, link: DeviceProfile = NO_WIRES, **options: Any) -> float:
    return 1e3 * evaluation_seconds(
        work, Parallelism(ring_degree=ring, ulysses_degree=ulysses).with_options(**options), link
    )


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (4, 1), (2, 2)])
def test_float8_gains_on_a_slow_link_and_nothing_on_nvlink(ring: int, ulysses: int) -> None:
    slow = replace(NVLINK, bytes_per_second=5e9, flops_per_second=1.6e14)

    def times(link: DeviceProfile) -> float:
        same = milliseconds(FLUX.work(1, IMAGE), ring, ulysses, link)
        return same / milliseconds(FLUX.work(1, IMAGE), ring, ulysses, link, comm_dtype="float8_e4m3fn")

    assert 1.05 < times(slow) < 2
    assert times(NVLINK) < 1.02


def test_keys_in_float8_are_never_sent_as_the_tokens_that_they_are_made_of() -> None:
    level = RowLevel(weights=1, attentions=1, width=640, messages=1)
    work = replace(replace(FLUX, row_levels=(level, level)).work(1, IMAGE), row_ranks=2)
    slow = replace(NVLINK, bytes_per_second=1e9)

    def chosen(**options: Any) -> str:
        degrees = Parallelism(ring_degree=2).with_options(rotate_method="auto", **options)
        return rotate_method_for(
            MemoryModel(work=work, degrees=degrees, capacity=Capacity(device_bytes=FREE_BYTES)), slow
        )

    assert (chosen(), chosen(comm_dtype="float8_e4m3fn")) == ("tokens", "allgather")


@pytest.mark.parametrize(
    ("ring", "ulysses", "least", "most"),
    [
        (1, 1, 176, 176), (1, 2, 117, 124), (2, 1, 106, 111), (1, 4, 90, 125), (4, 1, 146, 154), (2, 2, 108, 108),
        (1, 8, 110, 156), (8, 1, 253, 253), (2, 4, 175, 181),
    ],
)  # fmt: skip
def test_flux_as_it_was_measured_with_every_launch(ring: int, ulysses: int, least: float, most: float) -> None:
    assert least / CLOSE <= milliseconds(FLUX.work(1, IMAGE), ring, ulysses) <= most * CLOSE


@pytest.mark.parametrize(
    ("ring", "ulysses", "measured"),
    [(1, 1, 174), (1, 2, 96), (2, 1, 95), (1, 4, 52), (4, 1, 59), (2, 2, 57), (1, 8, 34), (8, 1, 44), (2, 4, 38)],
)
def test_flux_as_it_was_measured_as_a_graph(ring: int, ulysses: int, measured: float) -> None:
    estimated = milliseconds(FLUX.work(1, IMAGE, recorded=True), ring, ulysses)
    assert measured / CLOSE <= estimated <= measured * CLOSE


def test_a_ring_in_one_block_as_it_was_measured() -> None:
    estimated = milliseconds(FLUX.work(1, IMAGE, recorded=True), 8, rotate_method="allgather")
    assert 36.6 / CLOSE <= estimated <= 36.6 * CLOSE


@pytest.mark.parametrize(
    ("ring", "ulysses", "measured"),
    [(1, 1, 963), (1, 8, 132), (8, 1, 144), (2, 4, 137), (1, 4, 236), (4, 1, 245), (2, 2, 245)],
)
def test_wan_as_it_was_measured(ring: int, ulysses: int, measured: float) -> None:
    """There the GPU leads: recording gains nothing."""
    for recorded in (False, True):
        estimated = milliseconds(WAN.work(1, VIDEO, recorded=recorded), ring, ulysses)
        assert measured / CLOSE <= estimated <= measured * CLOSE


def degrees(work: Work, link: DeviceProfile, gpus: int = 8, **request: Any) -> tuple[int, int]:
    inputs = PlanInputs(request=ParallelRequest.of(request), network=work.network, gpus=gpus, work=work, profile=link)
    chosen = resolve(inputs).degrees
    return chosen.ring_degree, chosen.ulysses_degree


@pytest.mark.parametrize("recorded", [False, True])
def test_auto_takes_ulysses_where_wires_are_fast_and_a_ring_where_it_can_hide_behind_long_blocks(
    recorded: bool,
) -> None:
    assert degrees(FLUX.work(1, IMAGE, recorded=recorded), NVLINK) == (1, 8 if recorded else 4), "launches take longer"
    pcie = replace(NVLINK, bytes_per_second=1.2e10)
    ring, ulysses = degrees(WAN.work(1, 4 * VIDEO, recorded=recorded), pcie)
    assert ring > 1, "keys of a long video travel behind its attention"
    assert ring * ulysses == 8


def test_many_launches_are_a_reason_against_a_ring_and_recorded_ones_are_not() -> None:
    eager, recorded = (FLUX.work(1, IMAGE, recorded=recorded) for recorded in (False, True))
    assert milliseconds(eager, 8) > milliseconds(eager), "eight ranks are slower than one"
    assert milliseconds(recorded, 8) < milliseconds(recorded) / 3


RING = Parallelism(ring_degree=8, options=EngineOptions(rotate_method="auto"))


def rotating(work: Work, degrees: Parallelism, profile: DeviceProfile, device_bytes: int | None) -> str:
    memory = MemoryModel(work=work, degrees=degrees, capacity=Capacity(device_bytes=device_bytes))
    return rotate_method_for(memory, profile)


def test_a_ring_collects_where_the_link_is_fast_and_there_is_room() -> None:
    work = FLUX.work(1, IMAGE)
    assert rotating(work, RING, NVLINK, FREE_BYTES) == "allgather"
    assert rotating(work, RING, replace(NVLINK, bytes_per_second=1.2e10), FREE_BYTES) == "alltoall"
    needed = FLUX.weight_bytes + max(estimate_activation_bytes(work, RING)) + 2 * work.tensor_bytes / ALL_GATHERED_SHARE
    for free, method in ((needed + 2, "allgather"), (needed - 2, "alltoall")):
        assert rotating(work, RING, NVLINK, int(free)) == method
    assert rotating(work, RING, NVLINK, None) == "alltoall", "nobody knows what is free"


@pytest.mark.parametrize("method", ["alltoall", "allgather"])
def test_who_says_how_a_ring_goes_round_has_it_so(method: str) -> None:
    slow = replace(NVLINK, bytes_per_second=1e9)
    for link, free in ((slow, 1), (NVLINK, FREE_BYTES)):
        assert rotating(FLUX.work(1, IMAGE), RING.with_options(rotate_method=method), link, free) == method  # type: ignore[arg-type]


def test_a_step_is_as_much_faster_as_its_prompts_rows_and_tokens_are_shared() -> None:
    work = FLUX.work(2, IMAGE, prompts=2, recorded=True)
    assert times_as_fast(work, Parallelism(), NO_WIRES) == 1
    assert times_as_fast(work, Parallelism(cfg_degree=2), NO_WIRES) == 2
    assert times_as_fast(work, Parallelism(cfg_degree=2, data_degree=2), NO_WIRES) == pytest.approx(4, rel=0.05)
    assert 1.5 < times_as_fast(work, Parallelism(ulysses_degree=2), NO_WIRES) < 2


def test_images_of_a_group_fill_the_stages_of_its_pipeline_once() -> None:
    stages, groups = Parallelism(pipeline_degree=2), Parallelism(pipeline_degree=2, data_degree=2)
    both, each = FLUX.work(4, IMAGE), FLUX.work(2, IMAGE)
    assert evaluation_seconds(both, groups, NVLINK) == evaluation_seconds(each, stages, NVLINK)


def test_ulysses_is_estimated_with_as_many_waves_as_it_has() -> None:
    assert TWO_WAVES_BYTES == MIN_HIDDEN_BYTES
    slow = replace(NVLINK, bytes_per_second=1e9)
    both = [
        attention_seconds(FLUX.work(1, tokens), Parallelism(ulysses_degree=2), slow) / tokens for tokens in (3600, 3700)
    ]
    assert both[1] < both[0], "from 32 MiB on half of it hides"
