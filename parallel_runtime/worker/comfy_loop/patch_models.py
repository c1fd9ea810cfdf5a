"""What Load Model Patch gives, in this process: loaded by ComfyUI's own node, once, whatever models it lies on.

Kept while a model that this rank holds had it on it in its last job.
"""

from __future__ import annotations

import os
from typing import Any

import comfy.model_management
import folder_paths
import torch
from comfy.model_patcher import ModelPatcher

from ...errors import Refused
from ...mapped import Mapped, load_mapped
from ...specs import SourceFile
from ..ranks import refusing_together
from ..spread import check_files
from .comfyui import named

FOLDER = "model_patches"
LOADER = "comfy_extras.nodes_model_patch:ModelPatchLoader"
_loaded: dict[str, ModelPatcher] = {}
_used: dict[object, set[str]] = {}  # by the models that this rank holds


class PatchModels:
    """Those of one job, on the model `user`: what makes them of their descriptions."""

    def __init__(self, user: object) -> None:
        self._user = user
        self._mine: set[str] = set()

    def __call__(self, described: dict[str, Any]) -> ModelPatcher:
        """The model of one file. Collective where it is not here yet; Refused where the file is another one."""
        file = SourceFile(path=described["path"], size=described["size"], mtime_ns=described["mtime_ns"])
        key = f"{file.path} {file.size} {file.mtime_ns}"
        if key not in _loaded:
            with refusing_together():
                check_files([file])
                _loaded[key] = _load(file.path, assigned=described["assigned"])
        self._mine.add(key)
        return _loaded[key]

    def settle(self) -> None:
        """All of the job's are made; forget what no model's last job had."""
        _used[self._user] = self._mine
        _forget_unused()


def let_go(user: object) -> None:
    """This rank no longer holds the model."""
    if _used.pop(user, None):
        _forget_unused()


def beside(user: object) -> list[ModelPatcher]:
    """What was on a model in its last job."""
    return [_loaded[key] for key in sorted(_used.get(user, ()))]


def _forget_unused() -> None:
    for key in _loaded.keys() - set().union(*_used.values()):
        comfy.model_management.unload_model_and_clones(_loaded.pop(key))


def _load(path: str, *, assigned: bool) -> ModelPatcher:
    """As it was in ComfyUI, where its weights are `assigned` or copied. The node asks for a file by its name in a
    folder, and takes the first folder that has it."""
    folder, name = os.path.split(path)
    folder_paths.add_model_folder_path(FOLDER, folder, is_default=True)
    load = named(LOADER)().load_model_patch
    try:
        return load_mapped(_Unsettled, load, [name], 0) if assigned else load(name)[0]
    except FileNotFoundError as missing:
        raise Refused(f"a worker cannot find the model patch {path}: {missing}") from None


class _Unsettled(Mapped):
    """Its code may go by the dtype of its weights, so they keep the file's."""

    def settle(self, module: torch.nn.Module) -> None:
        pass
