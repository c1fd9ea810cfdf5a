"""What PyTorch allocated while something ran, counted by its profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most that was live at once, of what `run` allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = run()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    del kept
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
