"""What the table of prompts promises: CP CLIP loads no more for a prompt than ComfyUI alone, and less where it pays."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ..comfyui.comfy import find_comfy, why_there_is_none
from .prompts import measured, table


def test_no_prompt_loads_more_than_with_comfyui_alone_and_the_results_have_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if find_comfy() is None:
        pytest.skip(why_there_is_none())
    monkeypatch.setattr(sys, "argv", ["pytest"])  # whose options are not the command's
    found = measured()
    assert all(row["after"] <= row["before"] for row in found)
    assert sum(row["after"] < row["before"] for row in found) >= 6
    assert table(found) in (Path(__file__).parent / "RESULTS.md").read_text(encoding="utf-8")
