"""Python imports this by itself where this folder is on PYTHONPATH: in the server of a test, and in its workers."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

DETECTION = "comfy.model_detection"


class AcceptTinyFiles:
    """ComfyUI's detection of models hard-codes widths; what files say of themselves goes first (tiny_override.py)."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != DETECTION:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            beside("tiny_override").install_tiny_override(module)

        loader.exec_module = exec_module
        return spec


def beside(name: str) -> Any:
    """The module of this name in this folder."""
    spec = importlib.util.spec_from_file_location(
        f"cp_tests_{name}", os.path.join(os.path.dirname(__file__), f"{name}.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.meta_path.insert(0, AcceptTinyFiles)  # type: ignore[arg-type]
for fault in filter(None, os.environ.get("CP_TEST_FAULT", "").split(";")):
    beside("tape" if fault == "tape" else "sabotage").install(fault)
