"""What a CP Parallel Config says is read in one place, whoever says it: a node, a queued prompt, or the page."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pytest

from parallel_runtime.errors import Refused
from parallel_runtime.specs import ParallelRequest


def test_values_are_taken_by_name_and_the_rest_is_as_usual() -> None:
    request = ParallelRequest.of({"ring_degree": 2, "weights": "shard", "step_cache": 0, "a_widget_of_others": [1]})
    assert request == ParallelRequest(ring_degree=2, weights="shard", step_cache=0)
    assert ParallelRequest.of({}) == ParallelRequest()
    assert ParallelRequest.of(asdict(request)) == request


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("ring_degree", "three", "a whole number"),
        ("ring_degree", True, "a whole number"),
        ("ring_degree", 2.0, "a whole number"),
        ("ring_degree", ["4", 0], "a whole number"),
        ("data_degree", None, "a whole number"),
        ("convert_to_fp32", 1, "true or false"),
        ("devices", 0, "a text"),
        ("step_cache", "0.1", "a number"),
        ("step_cache", True, "a number"),
        ("step_cache", math.nan, "a number"),
        ("rotate_method", "zig", "one of alltoall, allgather, auto"),
        ("rotate_method", ["alltoall"], "one of alltoall, allgather, auto"),
        ("compile", False, "one of off, on"),
    ],
)
def test_what_a_widget_cannot_hold_is_refused_by_name_with_what_it_can(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(Refused) as refused:
        ParallelRequest.of({name: value})
    assert str(refused.value) == f"{name} is {value!r}, and not {wanted}"


def test_what_is_empty_is_also_called_auto() -> None:
    assert ParallelRequest.of({"devices": "auto", "rdzv_endpoint": "auto"}) == ParallelRequest()


@pytest.mark.parametrize("values", [None, [], "ring_degree", 2])
def test_what_is_no_object_is_no_config(values: Any) -> None:
    with pytest.raises(Refused, match="expected an object of widget values"):
        ParallelRequest.of(values)


@pytest.mark.parametrize(
    ("degrees", "by_heads"), [((0, 0), False), ((2, 0), True), ((0, 2), False), ((2, 1), False), ((1, 0), True)]
)
def test_how_many_workers_are_needed_depends_on_heads_beside_a_ring_that_is_given(
    degrees: tuple[int, int], by_heads: bool
) -> None:
    ring, ulysses = degrees
    assert ParallelRequest(ring_degree=ring, ulysses_degree=ulysses).by_heads == by_heads
