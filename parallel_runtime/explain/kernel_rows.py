"""What the workers found out about kernels, in words for CP Plan."""

from __future__ import annotations

from collections.abc import Sequence

from ..sentences import Sentence, listed, say
from ..specs import Parallelism
from ..wire.readings import WORTH_TELLING, Race


def kernel_sentences(races: Sequence[Race], degrees: Parallelism) -> list[str]:
    """What was found out about kernels where auto chooses them."""
    if degrees.options.attention_backend != "auto":
        return []
    what = "block" if degrees.ring_degree > 1 else "whole" if degrees.ulysses_degree > 1 else "alone"
    return [text for race in races if race.what == what and (text := _kernel(race))]


def _kernel(race: Race) -> str:
    times = dict(zip(race.kernels, race.microseconds, strict=True))
    if race.what == "alone":
        return _advice(race, times)
    fastest, *others = (_timed(name, time) for name, time in times.items())
    key = "kernel.ring" if race.what == "block" else "kernel.whole"
    if not others:
        return say(key, fastest=fastest, block=race.block)
    return say(f"{key}.before", fastest=fastest, others=listed(others), block=race.block)


def _timed(name: str, microseconds: float) -> Sentence:
    time = f"{microseconds:g}"
    return say("kernel.own", time=time) if name == "auto" else say("kernel.time", name=name, time=time)


def _advice(race: Race, times: dict[str, float]) -> str:
    """One worker keeps ComfyUI's own and its bits; "" where that costs little."""
    fastest = race.kernels[0]
    if times.get("auto", 0.0) <= WORTH_TELLING * times[fastest]:
        return ""
    own, time = f"{times['auto']:g}", f"{times[fastest]:g}"
    return say("kernel.advice", own=own, block=race.block, fastest=fastest, time=time)
