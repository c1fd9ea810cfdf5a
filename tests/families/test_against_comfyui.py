"""Each bridge answers a call as ComfyUI's own network answers it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")

from parallel_runtime.worker.loading import Loaded, load

from ..comfyui.comfy import find_comfy, why_there_is_none
from .recordings import all_cases, record, replay

EXACT = 1e-5  # of the output's standard deviation
CLOSE = 2e-2  # rms over std: two bfloat16 computations of one network differ by 5e-3 to 1.5e-2


@pytest.fixture(scope="session")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    comfy = find_comfy()
    if comfy is None:
        pytest.skip(why_there_is_none())
    folder = tmp_path_factory.mktemp("recordings")
    record(comfy, folder)
    return folder


@cache
def _loaded(checkpoint: Path, dtype: torch.dtype, hints: str) -> Loaded:
    return load(checkpoint, weight_dtype=dtype, compute_dtype=dtype, hints=json.loads(hints))


def _difference(folder: Path, name: str, case: str, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    recording = replay(folder, name, case, dtype)
    loaded = _loaded(recording.checkpoint, getattr(torch, dtype), json.dumps(recording.hints, sort_keys=True))
    assert {key for key, value in recording.cond.items() if value is not None} <= loaded.family.conditions
    with torch.inference_mode():
        ours = loaded.family.call(loaded.transformer, recording.x, recording.timestep, recording.cond)
    assert ours.shape == recording.output.shape
    return ours.float() - recording.output.float(), recording.output.float()


@pytest.mark.parametrize(("name", "case"), all_cases())
def test_float32_output_is_comfyuis(recordings: Path, name: str, case: str) -> None:
    difference, reference = _difference(recordings, name, case, "float32")
    worst = (difference.abs().max() / reference.std()).item()
    print(f"{name} {case} float32 {worst:.1e}")
    assert worst <= EXACT


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize(("name", "case"), all_cases())
def test_bfloat16_output_differs_only_by_rounding(recordings: Path, name: str, case: str) -> None:
    difference, reference = _difference(recordings, name, case, "bfloat16")
    rms = (difference.square().mean().sqrt() / reference.std()).item()
    print(f"{name} {case} bfloat16 {rms:.1e}")
    assert rms <= CLOSE
