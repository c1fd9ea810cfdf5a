"""Modules that call attention without transformer_options get the override of their own network, and no other."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from parallel_runtime.engine.attention.attention_override import OVERRIDE, AttentionOverride, wrap_modules
from parallel_runtime.engine.comm.mesh import ContextMesh, MeshDim
from parallel_runtime.engine.split.streams import Streams
from parallel_runtime.specs import Parallelism


def override() -> AttentionOverride:
    return AttentionOverride(Streams(MeshDim()), ContextMesh(), Parallelism())


def attention(*, transformer_options: Any = None) -> Any:
    return transformer_options


def test_a_module_imported_while_a_network_is_split_attends_natively_in_other_networks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As InfiniteTalk's, whose first file is loaded while a UNet is split by rows, which wraps ComfyUI's attention."""
    module: Any = ModuleType("attention_of_all")
    module.optimized_attention = attention
    monkeypatch.setitem(sys.modules, "attention_of_all", module)
    of_unet, of_video = override(), override()
    with wrap_modules(["attention_of_all"], of_unet), wrap_modules([], of_video):
        taken_by_another_module = module.optimized_attention
        of_unet.begin(None)
        assert module.optimized_attention() == {OVERRIDE: of_unet}
        of_unet.end()
        of_video.begin(None)
        assert taken_by_another_module() is None
        of_video.end()
    assert module.optimized_attention is attention
