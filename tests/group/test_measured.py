"""Two starts on the same machine split a run alike, whatever noise their measurements have."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from parallel_runtime.group.runtime import Measured
from parallel_runtime.planning.resolve import ranked
from parallel_runtime.planning.run_plan import DeviceProfile, RunPlan, Speed
from parallel_runtime.specs import Placement

from ..bench.plans import MACHINES, WORKS

TWO = Placement(devices=("cuda:0", "cuda:1"))


def noisy(profile: DeviceProfile, dice: random.Random, most: float = 1.15) -> DeviceProfile:
    def noise() -> float:
        return dice.uniform(1 / most, most)

    speeds = (Speed(products=x.products * noise(), attention=x.attention * noise()) for x in profile.ranks)
    return DeviceProfile(
        bytes_per_second=profile.bytes_per_second * noise(),
        flops_per_second=profile.flops_per_second * noise(),
        host_bytes_per_second=profile.host_bytes_per_second * noise(),
        ranks=tuple(speeds),
    )


def started(path: Path) -> Measured:
    """What a fresh ComfyUI has."""
    measured = Measured()
    measured.path = str(path)
    return measured


def split(plan: RunPlan) -> tuple[object, ...]:
    """What rounding depends on."""
    return plan.degrees, plan.placement, plan.entries_per_call


def test_every_start_splits_every_work_like_the_first_whatever_the_noise(tmp_path: Path) -> None:
    dice, by_noise = random.Random(3), 0
    for number, machine in enumerate(MACHINES):
        for work in WORKS.values():
            inputs = machine.inputs(work)
            assert inputs.profile is not None
            placement = Placement(devices=inputs.devices)
            starts = [noisy(inputs.profile, dice) for _ in range(4)]
            kept = [started(tmp_path / f"{number}.json").settled(placement, profile) for profile in starts]
            assert len({split(ranked(replace(inputs, profile=profile))[0]) for profile in kept}) == 1
            by_noise += len({split(ranked(replace(inputs, profile=profile))[0]) for profile in starts}) > 1
    assert by_noise > 10, "the noise says nothing"


def test_devices_that_became_much_faster_or_slower_are_measured_anew(tmp_path: Path) -> None:
    first = DeviceProfile(bytes_per_second=5e9, flops_per_second=1e14)
    for factor, known in ((1.4, first), (0.7, first), (1.6, None), (0.1, None)):
        path = tmp_path / str(factor)
        assert started(path).settled(TWO, first) == first
        other = replace(first, bytes_per_second=factor * first.bytes_per_second)
        assert started(path).settled(TWO, other) == (known or other)
        assert started(path).settled(TWO, other) == (known or other)


def test_each_placement_has_measurements_of_its_own(tmp_path: Path) -> None:
    one, two = (DeviceProfile(bytes_per_second=speed, flops_per_second=1e14) for speed in (0.0, 5e9))
    assert started(tmp_path / "file").settled(Placement(devices=("cuda:0",)), one) == one
    assert started(tmp_path / "file").settled(TWO, two) == two
    assert started(tmp_path / "file").settled(Placement(devices=("cuda:0",)), one) == one


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"1 x cpu": 3}', '{"1 x cpu": {"ranks": 3}}', json.dumps({"a": {}})])
def test_a_file_that_is_not_ours_is_replaced(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    measured = DeviceProfile(bytes_per_second=5e9, flops_per_second=1e14)
    assert started(tmp_path / "file").settled(TWO, measured) == measured
    assert started(tmp_path / "file").settled(TWO, replace(measured, bytes_per_second=6e9)) == measured


def test_without_a_place_for_the_file_measurements_stay_for_as_long_as_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    known, measured = started(tmp_path / "file" / "below"), DeviceProfile(bytes_per_second=5e9, flops_per_second=1e14)
    assert known.settled(TWO, measured) == measured
    assert "cannot be written" in caplog.text
    assert known.settled(TWO, replace(measured, bytes_per_second=6e9)) == measured
