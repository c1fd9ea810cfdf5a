"""Degrees and devices of a run are one thing, whatever is asked, measured and free; and the workers stay the same."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from parallel_runtime.errors import Refused
from parallel_runtime.planning.memory_model import Capacity
from parallel_runtime.planning.network_stats import NetworkStats
from parallel_runtime.planning.resolve import ranked
from parallel_runtime.planning.run_plan import DeviceProfile, PlanInputs, RunPlan
from parallel_runtime.request import ParallelRequest
from parallel_runtime.specs import Parallelism, Placement

GIB = 2**30
WAN = NetworkStats(
    name="Wan 2.1", heads=40, layers=40, width=5120, weights=14 * 10**9, weight_bytes=28 * 10**9, item_bytes=2,
    blocks=(7 * 10**8,) * 40,
)  # fmt: skip
LINKS = {
    "nothing": None,
    "no wire": DeviceProfile(bytes_per_second=0.0, flops_per_second=1e14),
    "slow": DeviceProfile(bytes_per_second=1e10, flops_per_second=1.4e14, host_bytes_per_second=2e10),
    "fast": DeviceProfile(bytes_per_second=3e11, flops_per_second=1.4e14, host_bytes_per_second=2e10),
}


def chosen(
    request: ParallelRequest,
    figures: NetworkStats = WAN,
    *,
    gpus: int = 6,
    gib: float = 24.0,
    host_gib: float = 500.0,
    link: DeviceProfile | None = LINKS["fast"],
    tokens: int = 4000,
    prompts: int = 2,
    no_lse: str = "",
    **known: bool,
) -> tuple[RunPlan, RunPlan]:
    """What a run gets before its workers have started and after they have measured, also where it does not fit."""
    figures = replace(figures, no_lse=no_lse)
    work = figures.work(1, tokens, prompts=prompts)
    capacity = Capacity(device_bytes=int(gib * GIB), host_bytes=int(host_gib * GIB))
    inputs = PlanInputs(
        request=request,
        network=figures,
        gpus=gpus,
        guided=prompts > 1,
        work=work,
        capacity=capacity,
        **known,
    )
    before, after = (ranked(replace(inputs, profile=measured))[0] for measured in (None, link))
    return before, after


IMAGES = NetworkStats(
    name="FLUX", heads=24, layers=57, width=3072, weights=12 * 10**9, weight_bytes=12 * 10**9, item_bytes=2,
    blocks=(2 * 10**8,) * 57,
)  # fmt: skip
SLOW_WIRE = DeviceProfile(bytes_per_second=5e9, flops_per_second=5e14, host_bytes_per_second=2e10)


@pytest.mark.parametrize(
    ("rows", "changed", "request_", "groups"),
    [
        (4, {}, {}, 4),
        (6, {}, {}, 4),  # the last two images leave half of the GPUs idle, and that is faster still
        (2, {}, {}, 4),  # two GPUs idle: over these wires no split of an image is as fast as one GPU
        (1, {}, {}, 4),
        (4, {}, {"data_degree": 1}, 1),
        (4, {}, {"ulysses_degree": 4}, 1),
        (4, {}, {"devices": "0,0,0,0"}, 1),
        (4, {"batch_coupled": True}, {}, 1),
        (4, {"network": replace(IMAGES, images_coupled=True)}, {}, 1),
        (4, {"profile": None}, {}, 1),
        (4, {"capacity": Capacity(device_bytes=8 * GIB, host_bytes=2 * GIB)}, {}, 2),  # two together have the weights
    ],
)
def test_images_of_a_batch_are_taken_apart_where_that_is_clearly_faster(
    rows: int, changed: dict[str, Any], request_: dict[str, Any], groups: int
) -> None:
    work, capacity = IMAGES.work(rows, 4608), Capacity(device_bytes=24 * GIB, host_bytes=500 * GIB)
    known = {"network": IMAGES, "work": work, "capacity": capacity, "profile": SLOW_WIRE, **changed}
    plan = ranked(PlanInputs(request=ParallelRequest.of(request_), gpus=4, **known))[0]
    assert plan.degrees.data_degree == groups
    assert plan.degrees.world_size == (1 if {"network", "batch_coupled"} & changed.keys() else 4)


def test_under_an_attention_of_another_node_both_prompts_go_to_the_workers_that_are_there() -> None:
    """Six devices: four take two prompts, five could take one sequence faster, and a run has four all the same."""
    for gib, tokens, degrees in ((24.0, 32_760, (1, 2, 1, 2)), (12.0, 4000, (1, 1, 1, 4))):
        before, after = chosen(ParallelRequest(), no_lse="another", gib=gib, tokens=tokens, host_gib=4.0)
        assert after.placement == before.placement == Placement(devices=tuple(f"cuda:{gpu}" for gpu in range(4)))
        assert after.degrees.stage_mesh_shape == degrees
        assert after.estimate is not None
        assert after.estimate.fits


def test_where_one_sequence_has_no_use_for_all_of_the_workers_each_half_keeps_its_prompt() -> None:
    six_heads = replace(WAN, heads=6)
    for gpus, degrees in ((8, (1, 2, 1, 3)), (4, (1, 2, 1, 2))):
        _, after = chosen(ParallelRequest(), six_heads, gpus=gpus, gib=12.0, no_lse="another", host_gib=4.0)
        assert after.degrees.stage_mesh_shape == degrees


@pytest.mark.parametrize("heads", [1, 3, 5])
def test_the_half_that_has_no_prompt_joins_the_rows_where_nothing_else_has_room(heads: int) -> None:
    request = ParallelRequest(cfg_degree=2)
    _, after = chosen(request, replace(WAN, heads=heads), gpus=2 * heads, no_lse="another", prompts=1)
    assert after.degrees.stage_mesh_shape == (2, 1, 1, heads)


ASKED: dict[str, tuple[Any, ...]] = {
    "ring_degree": (0, 0, 0, 1, 2),
    "ulysses_degree": (0, 0, 0, 1, 2, 3),
    "cfg_degree": (0, 0, 1, 2),
    "data_degree": (1, 1, 2),
    "weights": ("auto", "auto", "replicate", "shard", "offload"),
    "devices": ("", "", "0,1", "0,0,1", "cpu,cpu,cpu"),
}
KNOWN: dict[str, tuple[Any, ...]] = {
    "gpus": tuple(range(10)),
    "gib": (2.0, 6.0, 9.0, 12.0, 24.0, 80.0),
    "host_gib": (4.0, 500.0),
    "link": tuple(LINKS.values()),
    "tokens": (500, 4000, 75_000),
    "prompts": (1, 2, 3),
    "no_lse": ("", "another"),
    "batch_coupled": (False, True),
}
HEADS = (1, 2, 3, 6, 12, 24, 30, 40)


def test_degrees_and_devices_agree_and_the_workers_stay_whatever_is_asked_and_found() -> None:
    """All of overrides, prompts, memory and devices for auto, and a draw of everything else."""
    dice = random.Random(6)
    usual = [
        (ParallelRequest(), {"gpus": gpus, "gib": gib, "no_lse": no_lse, "prompts": prompts, "host_gib": host}, 40)
        for gpus, gib, no_lse, prompts, host in itertools.product(
            KNOWN["gpus"], KNOWN["gib"], (False, True), (1, 2), KNOWN["host_gib"]
        )
    ]
    drawn = [
        (ParallelRequest.of(_one_of_each(ASKED, dice)), _one_of_each(KNOWN, dice), dice.choice(HEADS))
        for _ in range(3000)
    ]
    refused = as_one = 0
    for request, known, heads in [*usual, *drawn]:
        figures = replace(WAN, heads=heads, divisible=dice.random() < 0.8)
        try:
            before, after = chosen(request, figures, **known)
        except Refused:
            refused += 1
            continue
        case = f"{request}, {known}, {heads} heads"
        for division in (before, after):
            assert division.degrees.world_size == division.placement.world_size, case
            assert division.degrees.ulysses_degree <= heads, case
            assert not (known["no_lse"] and division.degrees.ring_degree > 1), case
        if not known.get("batch_coupled"):  # there no group can repeat what others compute: fewer workers start
            assert after.placement == before.placement, case
        as_one += after.degrees.cfg_degree < before.degrees.cfg_degree
    assert refused < 0.6 * len(drawn), "most of the draw says nothing"
    assert as_one > 8, "memory decided hardly ever"


def test_degrees_and_devices_that_do_not_agree_cannot_be_put_together() -> None:
    with pytest.raises(ValueError, match=r"\(1, 1, 1, 5\) make 5 shares, and there are 4 workers"):
        RunPlan(degrees=Parallelism(ulysses_degree=5), placement=Placement(devices=("cpu",) * 4))
    with pytest.raises(TypeError, match="unpack"):
        _degrees, _placement = chosen(ParallelRequest())[0]  # type: ignore[misc]


def _one_of_each(values: dict[str, tuple[Any, ...]], dice: random.Random) -> dict[str, Any]:
    return {name: dice.choice(some) for name, some in values.items()}
