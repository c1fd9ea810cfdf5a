"""Sums up the kernels of a run on a device: how many of each kind, for how long, and how long the device was idle."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .cases import Measurement

KINDS = {  # by what the names of kernels contain, the first that fits
    "NCCL": ("nccl",),
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "packing by cat": ("CatArray",),
    "copies": ("copy", "Memcpy"),
    "products": ("gemm", "cutlass", "nvjet", "cublas"),
    "others": ("",),
}


class Span(NamedTuple):
    """A kernel or a copy, in microseconds."""

    name: str
    begin: float
    end: float


def timeline_of(run: Callable[[], Any]) -> Measurement:
    run()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        run()
        torch.cuda.synchronize()
    events = [event for event in profiled.events() or () if event.device_type == DeviceType.CUDA]
    return summed(Span(event.name, event.time_range.start, event.time_range.end) for event in events)


def summed(spans: Iterable[Span]) -> Measurement:
    """Returns the time from the first kernel to the last, and in words what it consists of."""
    ordered = sorted(spans, key=lambda span: span.begin)
    if not ordered:
        return {"note": "the profiler saw nothing on the device"}
    busy, until = 0.0, ordered[0].begin
    of_kinds: dict[str, list[float]] = {}
    for span in ordered:
        busy += max(0.0, span.end - max(span.begin, until))
        until = max(until, span.end)
        kind = next(kind for kind, parts in KINDS.items() if any(part in span.name for part in parts))
        of_kinds.setdefault(kind, []).append(span.end - span.begin)
    total = until - ordered[0].begin
    times = {kind: of_kinds[kind] for kind in KINDS if kind in of_kinds}
    parts = [f"{kind} {len(each)} in {sum(each) / 1e3:.3g} ms" for kind, each in times.items()]
    return {"ms": total / 1e3, "note": f"{(total - busy) / 1e3:.3g} ms of it without a kernel; {', '.join(parts)}"}
