"""Custom node packs: ComfyUI's process and the workers import the same files, under the names that ComfyUI gives them.

A module of a pack is known as `custom_nodes/PACK@FINGERPRINT/MODULE`: ".a.b" below the pack's package, "" for that
itself, or the whole name of a module that the pack has put onto sys.path. A worker imports a pack when a job names it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import folder_paths
import torch

from ..errors import Refused, WorkerLost, say
from .fingerprint import fingerprint

PREFIX = "custom_nodes/"
ENDS = ("exited", "gone", "killed", "silent")  # how workers end that a pack ends as it is imported
FAILURES = ("pack.missing", "pack.other", "pack.fails", "pack.replaces")
OURS = os.path.realpath(Path(__file__).parents[2])
STARTED = time.time()  # this process has what files were before
unusable: dict[str, str] = {}  # in ComfyUI's process, by PACK@FINGERPRINT: why workers have failed to import it
asked: set[str] = set()  # in a worker: those it was to import, alike on all ranks, also where that failed
proven: set[str] = set()  # in ComfyUI's process: those that workers have imported


def pack_of(module: str) -> tuple[str, str] | None:
    """Returns the folder of custom nodes and the name of the pack whose module of this process this is; None for none,
    and for ours."""
    return _pack_of(getattr(sys.modules.get(module), "__file__", None) or "")


@functools.cache
def _pack_of(file: str) -> tuple[str, str] | None:
    for folder in folder_paths.get_folder_paths("custom_nodes") if file else ():
        for path in (os.path.abspath, os.path.realpath):  # a pack may be a link
            if path(file).startswith(path(folder) + os.sep):
                pack = os.path.relpath(path(file), path(folder)).split(os.sep)[0]
                return None if os.path.realpath(os.path.join(folder, pack)) == OURS else (folder, pack)
    return None


def pack_reference(module: str) -> str | None:
    """Returns a module of a pack as the workers know it; None for any other. Raises Refused where the pack's files have
    changed since this process began."""
    if (found := pack_of(module)) is None:
        return None
    folder, pack = found
    path = os.path.join(folder, pack)
    own = module_of_pack(path)
    inside = module.removeprefix(own) if module == own or module.startswith(f"{own}.") else module
    return f"{PREFIX}{pack}@{pack_fingerprint(path)}/{inside}"


def name_of_pack(module: str) -> str:
    """Returns the pack whose module this is; "" for none."""
    found = pack_of(module)
    return found[1] if found else ""


def in_import_order(packs: Iterable[str]) -> list[str]:
    """Sorts PACK@FINGERPRINTs by when this process has imported them: of several that replace the same code, each keeps
    what was there."""
    places = {name: place for place, name in enumerate(sys.modules)}
    return sorted(packs, key=lambda pack: places.get(module_of_pack(path_of_pack(pack) or ""), -1))


def path_of_pack(pack: str) -> str | None:
    """Returns where PACK or PACK@FINGERPRINT is installed here."""
    name = pack.partition("@")[0]
    folders = folder_paths.get_folder_paths("custom_nodes")
    return next((path for folder in folders if os.path.exists(path := os.path.join(folder, name))), None)


def packs_named(reference: str) -> list[str]:
    """Returns PACK@FINGERPRINT of a pack's module, class or function; nothing for one of ComfyUI's."""
    return [reference.removeprefix(PREFIX).partition("/")[0]] if reference.startswith(PREFIX) else []


def module_of_pack(path: str) -> str:
    """Returns the name that ComfyUI's `load_custom_node` gives the module of the pack at `path`."""
    return path.replace(".", "_x_") if os.path.isdir(path) else os.path.splitext(path)[0]


@functools.cache
def pack_fingerprint(path: str) -> str:
    """Fingerprints the source files of the pack at `path`, a folder or one file. Raises Refused where one has changed
    since this process began."""
    return fingerprint(*itertools.chain(*pack_files(path).items()))[:12]


@functools.cache
def pack_files(path: str) -> dict[str, str]:
    """Returns a fingerprint of each source file of the pack at `path`, by its name there. Raises Refused likewise."""
    found = {}
    for file in sorted(Path(path).rglob("*.py")) if os.path.isdir(path) else [Path(path)]:
        if file.stat().st_mtime > STARTED:
            raise Refused("pack.changed", pack=os.path.basename(path), file=str(file))
        found[file.relative_to(path).as_posix()] = fingerprint(file.read_bytes())[:12]
    return found


def files_of(packs: Iterable[str]) -> dict[str, dict[str, str]]:
    """Returns the files of PACK@FINGERPRINTs of this process, so that others can say which one differs there."""
    return {pack: pack_files(path) for pack in packs if (path := path_of_pack(pack)) is not None}


def note_failed_import(packs: list[str], error: Refused | WorkerLost) -> bool:
    """Remembers which of these packs workers cannot have: the one that they refused by name, or all that they have
    imported for the first time where they ended meanwhile. Returns whether the run may be repeated without."""
    if isinstance(error, WorkerLost):
        kind = error.cause.kind if error.cause is not None else ""
        failed = [pack for pack in packs if kind != "out_of_memory" and pack not in proven]
        unusable.update({pack: say("pack.fatal", reason=str(error)) for pack in failed})
        return bool(failed) and kind in ENDS
    if error.code not in FAILURES:
        return False
    failed = [pack for pack in packs if pack.rpartition("@")[0] == error.values["pack"]]
    unusable.update(dict.fromkeys(failed, error.sentence))
    return bool(failed) or (error.code == "pack.replaces" and bool(error.values["pack"]))


def pack_module(reference: str) -> ModuleType:
    """Returns a pack's module by its reference, and imports it if need be. Raises Refused."""
    pack, _, inside = reference.removeprefix(PREFIX).partition("/")
    own = import_pack(pack)
    name = own + inside if not inside or inside.startswith(".") else inside
    module = importlib.import_module(name)
    if pack_of(name) is None:
        raise Refused("worker.reference", name=reference)
    return module


def import_pack(pack: str, files: Mapping[str, str] | None = None) -> str:
    """Imports PACK@FINGERPRINT, whose `files` are these, as ComfyUI does, and returns its module's name. Raises Refused
    where it is not there, has other files, or fails."""
    name, _, expected = pack.rpartition("@")
    if os.path.basename(name) != name:
        raise Refused("worker.reference", name=pack)
    if (path := path_of_pack(name)) is None:
        raise Refused("pack.missing", pack=name, folders=folder_paths.get_folder_paths("custom_nodes"))
    if pack_fingerprint(path) != expected:
        ours, theirs = pack_files(path), files or {}
        file = next((one for one in sorted({*ours, *theirs}) if ours.get(one) != theirs.get(one)), "")
        raise Refused("pack.other", pack=name, path=path, file=file)
    module = module_of_pack(path)
    if module not in sys.modules:
        _import(name, module, os.path.join(path, "__init__.py") if os.path.isdir(path) else path)
    return module


def installed() -> list[str]:
    """Returns the paths of the packs that ComfyUI imports when it starts, without ours."""
    found = []
    for folder in filter(os.path.isdir, folder_paths.get_folder_paths("custom_nodes")):
        paths = [os.path.join(folder, name) for name in sorted(os.listdir(folder), key=str.lower)]
        found += [path for path in paths if not path.endswith(("__pycache__", ".disabled"))
                  and (os.path.isdir(path) or path.endswith(".py")) and os.path.realpath(path) != OURS]  # fmt: skip
    return found


def prepare_imports() -> None:
    """Imports of ComfyUI what packs take for granted."""
    _stand_in_for_server()
    importlib.import_module(
        "comfy_extras.nodes_post_processing"
    )  # nodes_latent imports it, and it that: not to be first


def _import(pack: str, name: str, file: str) -> None:
    prepare_imports()
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with torch.inference_mode(False):  # as in ComfyUI, when it starts
            spec.loader.exec_module(sys.modules[name])
    except BaseException as error:  # anybody's code, which may even want to exit
        for module in [module for module in sys.modules if module == name or module.startswith(f"{name}.")]:
            del sys.modules[module]
        raise Refused("pack.fails", pack=pack, error=f"{type(error).__name__}: {error}") from error


def _stand_in_for_server() -> None:
    """Gives ComfyUI's PromptServer an instance that serves nothing: packs add routes to it as they are imported."""
    importlib.import_module("nodes")  # ComfyUI's: it has to come before `server`
    import server
    from aiohttp import web

    if getattr(server.PromptServer, "instance", None) is None:
        server.PromptServer.instance = _Nothing(
            routes=web.RouteTableDef(), client_id=None, last_node_id=None, sockets={}
        )


class _Nothing:
    """Has every attribute and takes every call, and does nothing."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()

    def __call__(self, *_: Any, **__: Any) -> Any:
        return _Nothing()

    def __bool__(self) -> bool:
        return False
