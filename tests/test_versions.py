"""A ComfyUI that lacks what we call is told so in one sentence, which its loader of nodes logs."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def pack(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Our pack as ComfyUI loads it, where there is no ComfyUI."""
    root = Path(__file__).absolute().parents[1]
    spec = importlib.util.spec_from_file_location("pack", root / "__init__.py", submodule_search_locations=[str(root)])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "pack", module)
    spec.loader.exec_module(module)
    return module


def refusal_of(pack: ModuleType, version: str, monkeypatch: pytest.MonkeyPatch) -> str:
    comfyui_version = ModuleType("comfyui_version")
    comfyui_version.__dict__["__version__"] = version
    monkeypatch.setitem(sys.modules, "comfyui_version", comfyui_version)
    with pytest.raises(RuntimeError) as refusal:
        pack.comfy_entrypoint().send(None)  # a browser's tests have an event loop running
    return str(refusal.value)


@pytest.mark.parametrize("version", ["0.3.71", "0.9", "0.14.1", "0.15.0"])
def test_an_old_comfyui_is_told_which_it_takes(pack: ModuleType, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = refusal_of(pack, version, monkeypatch)
    assert sentence == f"CP Sampler needs ComfyUI 0.15.1 or newer, and this is {version}; update ComfyUI"


@pytest.mark.parametrize("version", ["0.15.1", "0.33.0", "1.2", "0.34.0rc1"])
def test_a_name_that_is_missing_is_named(pack: ModuleType, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comfy_api", None)
    sentence = refusal_of(pack, version, monkeypatch)
    assert sentence.startswith(f"CP Sampler does not fit ComfyUI {version}: ")
    assert "comfy_api" in sentence
    assert "\n" not in sentence
