"""How long is waited for what: the environment's word, else what was chosen while running, else the usual."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Sequence

log = logging.getLogger(__name__)


def seconds_from(variable: str, default: float) -> float:
    """A limit from the environment; what is no number of seconds is said and not used: 0 only where that is the
    default."""
    text = os.environ.get(variable, "").strip()
    if not text:
        return default
    number = _number(text)
    if number is not None and (number or not default):
        return number
    log.warning("[CP] %s=%r is no number of seconds that can be waited; %g is used", variable, text, default)
    return default


def numbers_from(variable: str, what: str) -> tuple[float, ...]:
    """One or several, with commas between them; none where the environment says nothing of the kind."""
    text = os.environ.get(variable, "").strip()
    numbers = [_number(one) for one in text.split(",")] if text else []
    if None in numbers:
        log.warning("[CP] %s=%r is no %s; it is not used", variable, text, what)
        return ()
    return tuple(number for number in numbers if number is not None)


def of_each(numbers: Sequence[float], workers: int) -> tuple[float, ...]:
    """One for each of so many workers, infinite for 0: one number is for all, and so is the least of several that are
    not as many as the workers. None where there is no limit at all."""
    known = [number or math.inf for number in numbers]
    each = known if len(known) == workers else [min(known, default=math.inf)] * workers
    return tuple(each) if min(each) < math.inf else ()


def _number(text: str) -> float | None:
    """At least 0, and no more than can be counted; None for anything else."""
    with contextlib.suppress(ValueError):
        number = float(text)
        if math.isfinite(number) and number >= 0:
            return number
    return None


class Limit:
    """Seconds that may be chosen anew at any time; one that the environment names stays as it is."""

    def __init__(self, variable: str, default: float) -> None:
        self.usual = default
        self.fixed = bool(os.environ.get(variable, "").strip())
        self._seconds = seconds_from(variable, default)

    def choose(self, seconds: float | None) -> None:
        """Take `seconds`, None for the usual; what is no such number is not used."""
        chosen = self.usual if seconds is None else seconds
        if not self.fixed and math.isfinite(chosen) and (chosen > 0 or chosen == self.usual):
            self._seconds = chosen

    def __float__(self) -> float:
        return float(self._seconds)


def stall_limit() -> Limit:
    """Without a sign of life from a worker at work."""
    return Limit("CP_STALL_SECONDS", 120)
