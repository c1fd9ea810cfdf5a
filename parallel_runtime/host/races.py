"""What the workers found out about kernels, in words for CP Plan."""

from __future__ import annotations

from collections.abc import Sequence

from ..specs import Parallelism
from ..wire.readings import WORTH_TELLING, Race

OWN = "ComfyUI's own"


def told(races: Sequence[Race], degrees: Parallelism) -> list[str]:
    """What was found out about kernels where auto chooses them."""
    if degrees.attention_backend != "auto":
        return []
    what = "block" if degrees.ring_degree > 1 else "whole" if degrees.ulysses_degree > 1 else "alone"
    return [text for race in races if race.what == what and (text := _kernel(race))]


def _kernel(race: Race) -> str:
    times = dict(zip(race.kernels, race.microseconds, strict=True))
    if race.what == "alone":
        return _advice(race, times)
    fastest, *others = (f"{OWN if name == 'auto' else name} with {time:g} us" for name, time in times.items())
    behind = f", before {', '.join(others)}" if others else ""
    where = "the ring's blocks of" if race.what == "block" else "whole keys,"
    return f"{fastest}{behind}, for {where} {race.block}."


def _advice(race: Race, times: dict[str, float]) -> str:
    """One worker keeps ComfyUI's own and its bits; "" where that costs little."""
    fastest = race.kernels[0]
    if times.get("auto", 0.0) <= WORTH_TELLING * times[fastest]:
        return ""
    return (
        f"ComfyUI's own, with {times['auto']:g} us for {race.block}. {fastest} takes {times[fastest]:g} us: "
        f"set attention_backend to {fastest} in CP Parallel Config to have it; its rounding is another."
    )
