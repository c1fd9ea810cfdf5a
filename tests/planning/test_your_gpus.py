"""The estimates that the docs give are those of the planner."""

from __future__ import annotations

from pathlib import Path

from .your_gpus import machine_rows, memory_rows

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_on_machines_has_the_planners_estimates() -> None:
    assert "\n".join(machine_rows()) in (DOCS / "your-gpus.md").read_text(encoding="utf-8")


def test_the_page_on_memory_has_the_planners_sizes() -> None:
    assert "\n".join(memory_rows()) in (DOCS / "memory.md").read_text(encoding="utf-8")
