"""The nearest CP Parallel Config that works, told as widgets to set."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from parallel_runtime.errors import Refused
from parallel_runtime.explain.remedy import Change, changes, in_words, instead
from parallel_runtime.group.machine_check import checked_plan
from parallel_runtime.planning.network_stats import NetworkStats
from parallel_runtime.planning.plan_inputs import PlanInputs
from parallel_runtime.request import ParallelRequest


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"ring_degree": 3, "ulysses_degree": 1}, "ring_degree 2"),
        ({"ring_degree": 1, "ulysses_degree": 1, "devices": "0,1"}, "ring_degree on auto, ulysses_degree on auto"),
        ({"devices": "9"}, "devices on auto"),
        ({"step_cache": 0.5, "devices": "9"}, "devices on auto, step_cache 0.0"),
        ({"cuda_graphs": "on", "devices": "cpu,cpu"}, "cuda_graphs auto"),
    ],
)
def test_the_nearest_that_works_is_told_in_words(asked: dict[str, Any], says: str) -> None:
    request, inputs = ParallelRequest.of(asked), partial(PlanInputs, network=NetworkStats(heads=24), gpus=2)
    with pytest.raises(Refused) as refused:
        checked_plan(inputs(request=request))
    nearest = instead(lambda other: inputs(request=other), request, refused.value.fix)
    assert checked_plan(inputs(request=nearest))
    assert in_words(changes(request, nearest)) == says


def test_what_auto_decides_is_marked_for_the_page() -> None:
    before, after = ParallelRequest.of({"ring_degree": 2, "step_cache": 0.1}), ParallelRequest()
    assert changes(before, after) == (
        Change(name="ring_degree", value=0, automatic=True),
        Change(name="step_cache", value=0.0, automatic=False),
    )
    assert changes(before, before) == ()
