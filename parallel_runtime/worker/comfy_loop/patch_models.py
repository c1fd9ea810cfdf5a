"""What Load Model Patch gives, in this process: loaded by ComfyUI's own node, once, whatever models it lies on.

Kept while a model that this rank holds had it on it in its last job.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
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
from .code import PatchModel
from .comfyui import named

FOLDER = "model_patches"
LOADER = "comfy_extras.nodes_model_patch:ModelPatchLoader"


class PatchModels:
    """Those of this rank."""

    def __init__(self) -> None:
        self._loaded: dict[SourceFile, ModelPatcher] = {}
        self._used: dict[object, set[SourceFile]] = {}  # by the models that this rank holds

    @contextmanager
    def of_job(self, user: object) -> Iterator[PatchModel]:
        """What makes those of a job on the model `user` of their descriptions. In the end those go that no model's last
        job had."""
        mine: set[SourceFile] = set()
        yield partial(self._made, mine)
        self._used[user] = mine
        self._forget_unused()

    def beside(self, user: object) -> list[ModelPatcher]:
        """What was on a model in its last job."""
        return [self._loaded[file] for file in sorted(self._used.get(user, ()), key=str)]

    def let_go(self, user: object) -> None:
        """This rank no longer holds the model."""
        if self._used.pop(user, None):
            self._forget_unused()

    def _made(self, mine: set[SourceFile], described: dict[str, Any]) -> ModelPatcher:
        """The model of one file. Collective where it is not here yet; Refused where the file is another one."""
        file = SourceFile(path=described["path"], size=described["size"], mtime_ns=described["mtime_ns"])
        if file not in self._loaded:
            with refusing_together():
                check_files([file])
                self._loaded[file] = _load(file.path, assigned=described["assigned"])
        mine.add(file)
        return self._loaded[file]

    def _forget_unused(self) -> None:
        for file in self._loaded.keys() - set().union(*self._used.values()):
            comfy.model_management.unload_model_and_clones(self._loaded.pop(file))


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
