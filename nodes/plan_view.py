"""What CP Plan's node shows beside the text: web/plan.js draws it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..parallel_runtime.errors import Refused
from ..parallel_runtime.host.picture import Part, parts, table
from ..parallel_runtime.host.planning import plan
from ..parallel_runtime.host.storing import Prospect
from ..parallel_runtime.specs import ParallelRequest
from .ahead import ANY_HEADS
from .workers import gpu_kind, visible_gpus


def view(report: str, recommended: ParallelRequest, way: Prospect | None) -> dict[str, Any]:
    """A node's ui: the report as text, and in pieces. `way` is None where the weights have no place."""
    rows, notes = table(report)
    ranks = _parts(recommended, way)
    shown = {"rows": rows, "notes": notes, "parts": [asdict(part) for part in ranks], "world_size": len(ranks)}
    return {"text": (report,), "cp_plan": [shown]}


def _parts(recommended: ParallelRequest, way: Prospect | None) -> list[Part]:
    """None where no degrees were found: the MODEL cannot run in the workers."""
    if not (recommended.ring_degree and recommended.ulysses_degree):
        return []
    try:
        return parts(
            *plan(recommended, heads=ANY_HEADS, gpus=visible_gpus(), kind=gpu_kind(), guided=True),
            sharded=way is not None and way.storage.mode == "shard",
            held=way.held_share if way is not None else 1.0,
        )
    except Refused:
        return []
