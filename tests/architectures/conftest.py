"""Ranks that run ComfyUI's networks, in ComfyUI's python."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..comfyui.comfy import find_comfy, why_there_is_none
from ..engine.conftest import Group, Groups, Ranks

MODULES = (
    "cases",
    "between_cases",
    "mutations",
    "caching_cases",
    "scale_cases",
    "weight_cases",
    "compile_cases",
    "recorded_cases",
    "inside_cases",
    "stage_cases",
    "patch_cases",
    "control_cases",
    "later_cases",
    "encoder_cases",
)


@pytest.fixture(scope="session")
def networks() -> Iterator[Groups]:
    comfy = find_comfy()
    if comfy is None:
        pytest.skip(why_there_is_none())
    modules = [f"tests.architectures.{name}" for name in MODULES]
    ranks = Ranks(comfy.python, modules, {"COMFYUI_PATH": str(comfy.root)})
    yield lambda world: Group(ranks, world)
    ranks.close()
