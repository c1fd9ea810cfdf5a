"""Reads the limits in the environment: seconds, and memory for each worker."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from functools import cache

log = logging.getLogger(__name__)


def seconds_from(variable: str, default: float) -> float:
    """Returns a limit from the environment, or the default with a warning if the value is no number of seconds; 0 is
    allowed only where it is the default."""
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    number = _number(text)
    if number is not None and (number or not default):
        return number
    log.warning("[CP] %s=%r is not a valid number of seconds; using %g", variable, text, default)
    return default


def limits_by_worker(variable: str, unit: str, workers: int) -> tuple[float, ...]:
    """Returns one limit a worker from the comma-separated numbers of an environment variable, infinite for 0. If there
    are not as many numbers as workers, the least is used for all. Returns () if nothing is limited, or with a warning
    if a number is invalid."""
    text = os.environ.get(variable, "").strip()
    numbers = [_number(one) for one in text.split(",")] if text else []
    if None in numbers:
        _warn_of_invalid(variable, text, unit)
        return ()
    known = [number or math.inf for number in numbers]
    each = known if len(known) == workers else [min(known, default=math.inf)] * workers
    return tuple(each) if min(each) < math.inf else ()


@cache
def _warn_of_invalid(variable: str, text: str, unit: str) -> None:
    """Logs a value that is ignored: once, though it is read several times a run."""
    log.warning("[CP] %s=%r is not a %s; it is ignored", variable, text, unit)


def _number(text: str) -> float | None:
    """Returns a finite number of at least 0, or None."""
    with contextlib.suppress(ValueError):
        number = float(text)
        if math.isfinite(number) and number >= 0:
            return number
    return None
