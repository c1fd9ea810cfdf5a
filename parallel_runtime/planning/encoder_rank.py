"""Chooses the worker that has a text encoder, whole: arithmetic on bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import Refused, say
from .misfit import size_in_words


def encoder_rank(
    needed_bytes: int, beside: Sequence[int | None], budgets: Sequence[int | None], limited_by: str = ""
) -> int:
    """Returns the rank with the most room `beside` the models that are loaded, if that is enough, else the one with
    the largest budget, where other models make room. None is no limit. Raises Refused where the encoder fits nowhere.

    Two workers, the second has less of a network: needed 5, beside (3, 7), budgets (20, 20) -> 1.
    """
    for rooms in (beside, budgets):
        known = [math.inf if room is None else room for room in rooms]
        rank = known.index(max(known))
        if needed_bytes <= known[rank]:
            return rank
    raise Refused(
        "clip.misfit",
        needed=size_in_words(needed_bytes, math.ceil),
        free=size_in_words(known[rank], math.floor),
        limit=say("memory.limited", limit=limited_by) if limited_by else "",
    )
