"""What CP Plan's node shows beside the text: web/plan.js draws it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ..parallel_runtime.host.picture import Part, table


def view(report: str, ranks: Sequence[Part]) -> dict[str, Any]:
    """A node's ui: the report as text, and in pieces. No ranks: the MODEL cannot run in the workers."""
    rows, notes = table(report)
    shown = {"rows": rows, "notes": notes, "parts": [asdict(part) for part in ranks], "world_size": len(ranks)}
    return {"text": (report,), "cp_plan": [shown]}
