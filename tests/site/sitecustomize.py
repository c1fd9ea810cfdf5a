"""Python imports this by itself where this folder is on PYTHONPATH: in the server of a test, and in its workers."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

DETECTION = "comfy.model_detection"
SMALL: dict[str, dict[str, dict[str, Any]]] = {  # sizes by class, by module
    "comfy.text_encoders.qwen_vl": {
        "Qwen2VLVisionTransformer": {"hidden_size": 64, "intermediate_size": 32, "num_heads": 2, "num_layers": 2}
    },
    "comfy.ldm.minimax.vae": {
        "MiniMaxH3VideoVAE": {
            "ch": 32, "ch_mult": (1, 1, 1, 1, 1, 1), "num_res_blocks": 1, "tile_size": 64, "tile_overlap_min": 16
        },
        "ViT3DDecoder": {"num_layers": 2, "heads": 2, "dim_head": 32},
    },
    "comfy.ldm.minimax.audio_vae": {
        "MiniMaxH3AudioVAE": {"encoder_dim": 8, "latent_dim": 64, "decoder_dim": 128},
    },
}  # fmt: skip
PATCHES = os.path.join("comfy_extras", "nodes_model_patch.py")


class WhenImported:
    """A finder of one module, whatever package of packs it is in: `then` is called with it as soon as it has been
    imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name != self.name and not name.endswith(f".{self.name}"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.then(module)

        loader.exec_module = exec_module
        return spec


def accept_tiny_files(detection: ModuleType) -> None:
    """ComfyUI's detection of models hard-codes widths; what files say of themselves goes first (tiny_override.py)."""
    neighbour("tiny_override").install_tiny_override(detection)


def shrink(**kinds: dict[str, Any]) -> Callable[[ModuleType], None]:
    """ComfyUI hard-codes these sizes of these classes of a module."""

    def then(module: ModuleType) -> None:
        for name, small in kinds.items():
            kind: Any = getattr(module, name)
            kind.__init__ = shrunk(kind.__init__, small)

    return then


def shrunk(make: Callable[..., None], small: dict[str, Any]) -> Callable[..., None]:
    def init(self: Any, *args: Any, **settings: Any) -> None:
        make(self, *args, **settings | small)

    return init


def accept_tiny_patches() -> None:
    """ComfyUI imports its extra nodes by their file, so that no finder is asked for them."""
    loader: Any = importlib.machinery.SourceFileLoader
    execute = loader.exec_module

    def exec_module(self: Any, module: ModuleType) -> None:
        execute(self, module)
        if self.path.endswith(PATCHES):
            neighbour("tiny_patches").shrink(module)

    loader.exec_module = exec_module


def neighbour(name: str) -> Any:
    """The module of this name in this folder."""
    spec = importlib.util.spec_from_file_location(
        f"cp_tests_{name}", os.path.join(os.path.dirname(__file__), f"{name}.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


sys.meta_path.insert(0, WhenImported(DETECTION, accept_tiny_files))  # type: ignore[arg-type]
for name, kinds in SMALL.items():
    sys.meta_path.insert(0, WhenImported(name, shrink(**kinds)))  # type: ignore[arg-type]
accept_tiny_patches()
for fault in filter(None, os.environ.get("CP_TEST_FAULT", "").split(";")):
    if fault == "tape":
        tape = neighbour("tape")
        sys.meta_path.insert(0, WhenImported(tape.RECORDING, tape.record_with_tapes))  # type: ignore[arg-type]
    elif fault == "meter":
        meter = neighbour("meter")
        sys.meta_path.insert(0, WhenImported(meter.BUNDLES, meter.log_bytes))  # type: ignore[arg-type]
    else:
        neighbour("sabotage").install(fault)
