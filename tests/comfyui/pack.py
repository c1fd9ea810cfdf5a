"""Our pack in a process of ComfyUI's python without a server; `node_module("remote.lease")` is one of ours."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

from ..zoo.tiny import start_comfyui
from .comfy import OUR_ROOT

PACK = "cp_pack"

start_comfyui()
sys.path.insert(0, os.environ["COMFYUI_PATH"])  # before us: both have a module `nodes`


def node_module(name: str) -> Any:
    return pack_module(f"nodes.{name}")


def pack_module(name: str) -> Any:
    """Of the pack as ComfyUI imports it: under a name of its own."""
    if PACK not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            PACK, OUR_ROOT / "__init__.py", submodule_search_locations=[str(OUR_ROOT)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[PACK] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[PACK])
    return importlib.import_module(f"{PACK}.{name}")
