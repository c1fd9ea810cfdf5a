"""What only a GPU shows: recorded graphs stay right and give memory back, and offload is right without page locks."""

from __future__ import annotations

import pytest

from ..bench.report.measuring import Setting
from ..bench.report.part import measurements_of
from ..comfyui.comfy import find_comfy, why_there_is_none

SECONDS = 300.0


def failures(part: str, setting: Setting) -> list[str]:
    rows = list(measurements_of(f"tests.gpu.{part}", setting, processes=setting.world_size, seconds=SECONDS))
    assert rows
    return [f"{row['what']}: {row.get('failed', row.get('note'))}" for row in rows
            if "failed" in row or row["what"] == "the rest of this part"]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["graph_pools", "page_locks"])
def test_a_gpu_gives_memory_back_and_computes_right_after_a_call_that_failed(part: str) -> None:
    assert failures(part, Setting()) == []


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_replays_of_a_recorded_network_give_the_same_bits(ranks: int) -> None:
    if (comfy := find_comfy()) is None:
        pytest.skip(why_there_is_none())
    setting = Setting(world_size=ranks, one_card=ranks > 1, comfyui=str(comfy.root))
    assert failures("recordings", setting) == []
