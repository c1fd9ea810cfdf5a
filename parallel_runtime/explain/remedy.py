"""Finds the way out of a refusal: the nearest CP Parallel Config that works, and the widgets to change."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import Refused, listed, say
from ..request import ParallelRequest, widgets
from ..specs import DEGREES

Check = Callable[[ParallelRequest], object]  # raises Refused


@dataclass(frozen=True, kw_only=True)
class Change:
    """A widget to set, and its new value; `automatic`: that value leaves the choice to auto."""

    name: str
    value: Any
    automatic: bool


def instead(check: Check, request: ParallelRequest, refused: Refused) -> tuple[ParallelRequest, Refused]:
    """Returns the nearest request that `check`, which raises Refused, lets pass; and the refusal, which says what to
    change."""
    # Of what the refusal itself says and each single widget at its default, what changes the fewest widgets; if none of
    # these is enough, what this and all further refusals say.
    own = request.with_values(refused.fix)
    ones = [request.with_values({each.name: each.default}) for each in widgets()]
    working = [_least(check, request, one) for one in (own, *ones) if one != request and refusal(check, one) is None]
    working = working or [_least(check, request, _following(check, request, refused))]
    nearest = min(working, key=lambda one: len(changes(request, one)))
    changed = changes(request, nearest)
    if all(refused.fix.get(change.name) == change.value for change in changed):
        return nearest, refused
    reason = refused.values["reason"] if refused.code.startswith("nearest") else refused.sentence
    return nearest, Refused("nearest", widget=refused.widget, reason=reason, nearest=in_words(changed))


def _least(check: Check, request: ParallelRequest, mended: ParallelRequest) -> ParallelRequest:
    """Returns `mended` with every value of `request` that need not have been changed."""
    for name, value in request.values.items():
        restored = mended.with_values({name: value})
        if restored != mended and refusal(check, restored) is None:
            mended = restored
    return mended


def _following(check: Check, request: ParallelRequest, reason: Refused | None) -> ParallelRequest:
    """Returns the request after doing what refusals say, one after the other; an automatic one if that fails."""
    for _ in widgets():
        if reason is None:
            return request
        request = request.with_values(reason.fix)
        reason = refusal(check, request)
    return ParallelRequest(dtype=request.dtype)


def refusal(check: Check, request: ParallelRequest) -> Refused | None:
    try:
        check(request)
    except Refused as refused:
        return refused
    return None


def changes(before: ParallelRequest, after: ParallelRequest) -> tuple[Change, ...]:
    """Returns the changes from `before` to `after`."""
    return changes_to({name: value for name, value in after.values.items() if value != before.values[name]})


def changes_to(values: Mapping[str, Any]) -> tuple[Change, ...]:
    """Returns the changes that give widgets these values; empty devices are all of them, 0 is auto for degrees."""
    automatic = {name: value == "" or (value == 0 and name in DEGREES) for name, value in values.items()}
    return tuple(Change(name=name, value=values[name], automatic=automatic[name]) for name in values)


def in_words(changed: Sequence[Change]) -> str:
    """Returns a list such as "ring_degree 1, devices on auto"."""
    sentences = [
        say("set.auto", name=change.name) if change.automatic else say("set", name=change.name, value=change.value)
        for change in changed
    ]
    return listed(sentences) if sentences else ""
