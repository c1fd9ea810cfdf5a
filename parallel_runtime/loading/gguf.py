"""GGUF files, by the loader of the pack ComfyUI-GGUF where it is installed: its node, called as a graph would.

The MODEL of its own node does not say which file it came from, so only CP Load Diffusion Model can use this.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import comfy.utils
import folder_paths

from ..errors import Refused
from .mapped import Backup, Kind, load_mapped

LOADER = "ComfyUI-GGUF"
NODE = "UnetLoaderGGUF"
PATCHER = "GGUFModelPatcher"


def pack_folder(node: type) -> str:
    """Returns the folder of the pack that `node` belongs to. Raises Refused where that is not ComfyUI-GGUF."""
    home = sys.modules[node.__module__]
    if node.__name__ != NODE or not hasattr(home, PATCHER):
        raise Refused("gguf.loader", loader=node.__name__, pack=home.__name__)  # fmt: skip
    return os.path.dirname(os.path.realpath(str(home.__file__)))


def load(kind: type[Kind], folder: str, path: str) -> Kind:
    """Loads the file at `path` into a `kind` of patcher, with weights in the file's own format."""
    module = _imported(folder)
    patcher_class, node = getattr(module, PATCHER), getattr(module, NODE)
    with _first_folder(os.path.dirname(path)):
        patcher = load_mapped(kind, node().load_unet, [os.path.basename(path)], 0)

    class OfGGUF(kind, patcher_class):  # type: ignore[misc, valid-type]  # bases that are values
        """Patches weights as ComfyUI-GGUF does; the weights themselves are not moved."""

        mmap_released = True  # else the pack copies what is mapped

        def clone(self, *args: Any, **kwargs: Any) -> Any:
            made = kind.clone(self, *args, **kwargs)
            made.__class__ = OfGGUF  # the pack makes one of its own class
            return made

        def patch_weight_to_device(self, key: str, *args: Any, **kwargs: Any) -> Any:
            """Copies the weight's tensor object first: the pack writes patches onto it, beside its bytes."""
            if key in self.patches:
                weight = comfy.utils.get_attr(self.model, key)
                self.backup.setdefault(key, Backup(weight, False))
                comfy.utils.set_attr_param(self.model, key, copy.copy(weight))
            return super().patch_weight_to_device(key, *args, **kwargs)

    patcher.__class__ = OfGGUF
    return patcher


@contextmanager
def _first_folder(folder: str) -> Iterator[None]:
    """Has ComfyUI look for diffusion models in `folder` before all others: the pack's loader takes a name."""
    folders, cache = folder_paths.folder_names_and_paths["diffusion_models"][0], folder_paths.filename_list_cache
    before, cached = list(folders), dict(cache)
    folder_paths.add_model_folder_path("diffusion_models", folder, is_default=True)
    cache.clear()
    try:
        yield
    finally:
        folders[:] = before  # in place: other names of ComfyUI's and of the pack are this very list
        cache.clear()
        cache.update(cached)


def _imported(folder: str) -> Any:
    """Returns the pack's module of nodes: as ComfyUI imported it, or imported now."""
    path = os.path.join(folder, "nodes.py")
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) and os.path.realpath(str(module.__file__)) == os.path.realpath(path):
            return module
    if "custom_nodes" not in folder.split(os.sep):
        raise Refused("gguf.folder", folder=folder)
    name = f"cp_pack_{os.path.basename(folder).replace('-', '_').replace('.', '_')}"
    spec = importlib.util.spec_from_file_location(
        name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[f"{name}.nodes"]
