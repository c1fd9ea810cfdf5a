"""Puts the workers' benchmarks of attention kernels into words, for CP Plan."""

from __future__ import annotations

from collections.abc import Sequence

from ..accelerators import FALLBACK
from ..errors import Sentence, listed, say
from ..specs import Parallelism
from ..wire.readings import WORTH_TELLING, KernelBenchmark


def kernel_sentences(benchmarks: Sequence[KernelBenchmark], degrees: Parallelism) -> list[str]:
    """Returns a sentence on each benchmark by which auto chose kernels for these degrees."""
    if degrees.options.attention_backend != "auto":
        return []
    what = "block" if degrees.ring_degree > 1 else "full" if degrees.ulysses_degree > 1 else "alone"
    return [text for result in benchmarks if result.what == what and (text := _kernel(result))]


def _kernel(result: KernelBenchmark) -> str:
    times = dict(zip(result.kernels, result.microseconds, strict=True))
    if result.what == "alone":
        return _advice(result, times)
    fastest, *others = (_timed(name, time) for name, time in times.items())
    key = "kernel.ring" if result.what == "block" else "kernel.whole"
    if not others:
        return say(key, fastest=fastest, block=result.block)
    return say(f"{key}.before", fastest=fastest, others=listed(others), block=result.block)


def _timed(name: str, microseconds: float) -> Sentence:
    time = f"{microseconds:g}"
    return say("kernel.own", time=time) if name == FALLBACK else say("kernel.time", name=name, time=time)


def _advice(result: KernelBenchmark, times: dict[str, float]) -> str:
    """Advises a faster kernel to one worker, which keeps ComfyUI's own and its bits; "" where that gains little."""
    fastest = result.kernels[0]
    if times.get(FALLBACK, 0.0) <= WORTH_TELLING * times[fastest]:
        return ""
    values = {"own": f"{times[FALLBACK]:g}", "time": f"{times[fastest]:g}"}
    return say("kernel.advice", block=result.block, fastest=fastest, **values)
