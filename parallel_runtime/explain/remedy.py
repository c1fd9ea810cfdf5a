"""Finds the way out of a refusal: the nearest CP Parallel Config that works, and the widgets to change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import Refused, listed, say
from ..group.machine_check import checked_plan
from ..planning.plan_inputs import PlanInputs
from ..request import ParallelRequest
from ..specs import DEGREES


@dataclass(frozen=True, kw_only=True)
class Change:
    """A widget to set, and its new value; `automatic`: that value leaves the choice to auto."""

    name: str
    value: Any
    automatic: bool


def instead(
    inputs: Callable[[ParallelRequest], PlanInputs], request: ParallelRequest, fix: Mapping[str, Any]
) -> ParallelRequest:
    """Returns the nearest request that works: with the `fix` that the refusal names, with all degrees on auto, on its
    devices with everything else on auto, or all of it on auto."""
    nothing = ParallelRequest(dtype=request.dtype)
    devices = replace(nothing, devices=request.devices)
    for candidate in (request.with_values(fix), request.with_default_degrees, devices):
        with contextlib.suppress(Refused):
            checked_plan(inputs(candidate))
            return candidate
    return nothing


def changes(before: ParallelRequest, after: ParallelRequest) -> tuple[Change, ...]:
    """Returns the changes from `before` to `after`."""
    return changes_to({name: value for name, value in after.values.items() if value != before.values[name]})


def changes_to(values: Mapping[str, Any]) -> tuple[Change, ...]:
    """Returns the changes that give these widgets these values. Empty devices are all of them, and 0 is auto for
    degrees."""
    return tuple(
        Change(name=name, value=value, automatic=value == "" or (value == 0 and name in DEGREES))
        for name, value in values.items()
    )


def in_words(changed: Sequence[Change]) -> str:
    """Returns a list such as "ring_degree 1, devices on auto"."""
    sentences = [
        say("set.auto", name=change.name) if change.automatic else say("set", name=change.name, value=change.value)
        for change in changed
    ]
    return listed(sentences) if sentences else ""
