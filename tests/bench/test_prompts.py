"""What the table of prompts promises: CP CLIP loads no more for a prompt than ComfyUI alone, and less where it pays."""

from __future__ import annotations

from pathlib import Path

from .prompts import PAIRS, TWO, Job, encoder_of, kinds, natively, plan, rows, with_cp_clip


def test_no_prompt_loads_more_than_with_comfyui_alone() -> None:
    less = 0
    for name, bf16, tokens, prompts, _, parameters in PAIRS:
        for (_, network), (_, item_bytes) in kinds(bf16):
            planned = plan(TWO, Job(name=name, network=network, tokens=tokens, prompts=prompts), TWO.gpus)
            size = encoder_of(parameters, item_bytes)
            before, (after, _) = natively(planned, size), with_cp_clip(planned, size)
            assert after.encoder + after.network <= before.encoder + before.network, name
            less += after.encoder + after.network < before.encoder + before.network
    assert less >= 6


def test_the_results_have_the_table() -> None:
    assert "\n".join(rows()) in (Path(__file__).parent / "RESULTS.md").read_text(encoding="utf-8")
