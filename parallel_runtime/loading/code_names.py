"""Names of code: what ComfyUI's process calls a function or class, and what a worker finds under that name: ComfyUI's
own, that of installed packs, and a few of torch's.

ComfyUI's process and the workers import the same files of custom node packs, under the names that ComfyUI gives them. A
module of a pack is known as `custom_nodes/PACK@FINGERPRINT/MODULE`: ".a.b" below the pack's package, "" for that
itself, or the whole name of a module that the pack has put onto sys.path. A worker imports a pack when a job names it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
import time
from collections.abc import Iterable, Mapping
from functools import reduce
from itertools import chain
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import comfy.options
import folder_paths
import torch

from ..errors import Refused, WorkerLost, say
from .fingerprint import code_fingerprint, fingerprint

PREFIX = "custom_nodes/"
ENDS = ("exited", "gone", "killed", "silent")  # how workers end that a pack ends as it is imported
FAILURES = ("pack.missing", "pack.other", "pack.fails", "pack.replaces")
OURS = os.path.realpath(Path(__file__).parents[2])
STARTED = time.time()  # this process has what files were before
unusable: dict[str, str] = {}  # in ComfyUI's process, by PACK@FINGERPRINT: why workers have failed to import it
asked: set[str] = set()  # in a worker: those it was to import, alike on all ranks, also where that failed
proven: set[str] = set()  # in ComfyUI's process: those that workers have imported
ROOT = os.path.dirname(os.path.dirname(os.path.realpath(inspect.getfile(comfy.options))))
PACKAGES = ("comfy", "comfy_extras", "nodes")
EXTRA_NODES = "comfy_extras.nodes_"
LIBRARIES = (  # whose functions and classes code of packs may refer to: none of them loads, or runs, what it is told
    "torch.autograd.grad_mode", "torch.functional", "torch.nn.functional", "torch.nn.modules.", "torch.nn.parameter",
    "torch.utils._contextlib", "einops.", "sageattention.", "flash_attn.",
)  # fmt: skip
LOCAL = ".<locals>."


def pack_of(module: str) -> tuple[str, str] | None:
    """Returns the custom nodes' folder and the pack whose module this is; None for none, and for ours."""
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
    """Returns a pack's module as workers know it; None for others. Raises Refused if the pack's files changed."""
    if (found := pack_of(module)) is None:
        return None
    folder, pack = found
    path = os.path.join(folder, pack)
    own = module_of_pack(path)
    inside = module.removeprefix(own) if module == own or module.startswith(f"{own}.") else module
    return f"{PREFIX}{pack}@{pack_fingerprint(path)}/{inside}"


def in_import_order(packs: Iterable[str]) -> list[str]:
    """Sorts PACK@FINGERPRINTs as they were imported: of several that replace one thing, each keeps the last."""
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
    """Fingerprints a pack's source files, a folder or one. Raises Refused if one changed since this process began."""
    return fingerprint(*chain(*pack_files(path).items()))[:12]


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


def check_usable(packs: Iterable[str]) -> None:
    """Raises Unsendable for one of these PACK@FINGERPRINTs that workers have failed to import."""
    for pack in unusable.keys() & {*packs}:
        raise Unsendable("unsendable.pack", what="the packs' code", thing=pack, reason=unusable[pack])


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
        prepare_imports()
        try:
            with torch.inference_mode(False):  # as in ComfyUI, when it starts
                _import_file(os.path.join(path, "__init__.py") if os.path.isdir(path) else path, module)
        except BaseException as error:  # anybody's code, which may even want to exit
            for each in [each for each in sys.modules if each == module or each.startswith(f"{module}.")]:
                del sys.modules[each]
            raise Refused("pack.fails", pack=name, error=f"{type(error).__name__}: {error}") from error
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
    """Imports of ComfyUI what packs take for granted, and gives its PromptServer, to which packs add routes as they are
    imported, an instance that serves nothing."""
    importlib.import_module("nodes")  # ComfyUI's: it has to come before `server`
    import server
    from aiohttp import web

    if getattr(server.PromptServer, "instance", None) is None:
        known: dict[str, Any] = {"routes": web.RouteTableDef(), "client_id": None, "last_node_id": None, "sockets": {}}
        server.PromptServer.instance = _Nothing(**known)
    # nodes_latent imports it, and it that: nodes_latent must not be first.
    importlib.import_module("comfy_extras.nodes_post_processing")


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


class Unsendable(Refused):
    """Raised for what cannot be described: the loop then runs in ComfyUI's process, the network in the workers."""


def qualified_name(value: Any) -> str:
    """Returns `module.name` of a class, function or object's class; a custom node's module begins with its pack."""
    named = value if hasattr(value, "__qualname__") else type(value)
    module = _dotted(getattr(named, "__module__", None) or "?")
    return f"{module.rpartition(f'custom_nodes{os.sep}')[2]}.{named.__qualname__}"


def is_comfyui(value: Any) -> bool:
    """Is this class or function, or the class of this object, defined in ComfyUI's own packages?"""
    return _dotted(getattr(value, "__module__", None) or "?").split(".")[0] in PACKAGES


def is_of_a_pack(value: Any) -> bool:
    """Is this class or function, or the class of this object, defined in another pack that is installed here?"""
    return pack_of(home_of(value)) is not None


def home_of(value: Any) -> str:
    """Returns the name of the module that has a function's code, or that a class or object's class is defined in:
    functools.wraps gives a function another one's name."""
    value = getattr(value, "__func__", value)
    if isinstance(value, FunctionType):
        return str(value.__globals__.get("__name__", ""))
    module = getattr(value, "__module__", None)
    return module if isinstance(module, str) else ""


def _dotted(module: str) -> str:
    """Returns the dotted name of an extra node's module, which ComfyUI imports under the path of its file."""
    return os.path.relpath(module, ROOT).replace(os.sep, ".") if module.startswith(ROOT + os.sep) else module


def module_reference(module: str, what: str, thing: str) -> str:
    """Returns this process's module as the workers know it. Raises Unsendable for one that they cannot have."""
    name = _dotted(module)
    if name.split(".")[0] in PACKAGES or name.startswith(LIBRARIES):
        return name
    try:
        reference = pack_reference(module)
    except Refused as changed:
        raise Unsendable("unsendable.pack", what=what, thing=thing, reason=changed.sentence) from None
    if reference is None:
        raise Unsendable("unsendable.foreign", what=what, thing=thing)
    (pack,) = packs_named(reference)
    if (reason := unusable.get(pack)) is not None:
        raise Unsendable("unsendable.pack", what=what, thing=thing, reason=reason)
    return reference


def reference(value: Any, what: str) -> str:
    """Returns `module:name` of a class or function that workers have under that name. Raises Unsendable.

    ComfyUI runs a node as a copy of its class with the same name: the name is then that of the base class.
    """
    for candidate in inspect.getmro(value) if isinstance(value, type) else (value,):
        name = getattr(candidate, "__qualname__", "<>")
        if "<" in name or name != value.__qualname__:
            break
        if attribute(sys.modules.get(candidate.__module__), name) is candidate:
            return f"{module_reference(candidate.__module__, what, qualified_name(value))}:{name}"
    if LOCAL in value.__qualname__ and is_comfyui(value):
        raise Unsendable("unsendable.local", what=what, thing=qualified_name(value))
    raise Unsendable("unsendable.foreign", what=what, thing=qualified_name(value))


def attribute(owner: Any, path: str) -> Any:
    """Returns what `owner` has under a dotted path; None for nothing."""
    return reduce(lambda part, name: getattr(part, name, None), path.split("."), owner)


def named(reference: str) -> Any:
    """Returns `module:name` or `module:Class.name`. Raises Refused for modules that `module_reference` never names."""
    module, _, name = reference.partition(":")
    home = module_named(module, reference)
    value = attribute(home, name)
    defined_in = getattr(value, "__module__", None) or ""
    if _dotted(defined_in).split(".")[0] in PACKAGES or defined_in == home.__name__ or pack_of(defined_in):
        return value
    raise Refused("worker.reference", name=reference)


def module_named(name: str, of: str = "") -> ModuleType:
    """Imports a module by its reference, for the code `of` it. Extra nodes are imported by file, as the host does, as
    some have circular imports. Raises Refused for any other module."""
    if name.startswith(PREFIX):
        return pack_module(name)
    if name.split(".")[0] not in PACKAGES and not name.startswith(LIBRARIES):
        raise Refused("worker.reference", name=of or name)
    if not name.startswith(EXTRA_NODES):
        return importlib.import_module(name)
    path = os.path.join(ROOT, *name.split("."))
    return sys.modules.get(path) or _import_file(f"{path}.py", path)


def _import_file(file: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def code_named(reference: str, fingerprint: str) -> CodeType:
    """Returns the code of a function that another one defines, `module:outer.<locals>.inner`, or that a decorator or a
    pack has replaced. Raises Refused where this process has another function of that name, as after an update while
    ComfyUI runs."""
    module, _, path = reference.partition(":")
    outermost, *inner = path.split(LOCAL)
    home, names = module_named(module), ".".join(inner).split(".") if inner else []
    codes = _codes_within(_codes(attribute(home, outermost)), names)
    codes += _codes_within(source_code(home), [*outermost.split("."), *names])
    code = next((code for code in codes if code_fingerprint(code) == fingerprint), None)
    if code is None:
        raise Refused("comfyui.changed", name=reference)
    return code


def _codes_within(codes: list[CodeType], names: list[str]) -> list[CodeType]:
    """Returns the code of that path of names; a class inside of a function is code too."""
    for name in names:
        inside = [part for code in codes for part in code.co_consts if isinstance(part, CodeType)]
        codes = [part for part in inside if part.co_name == name]
    return codes


@functools.cache
def source_code(module: ModuleType) -> list[CodeType]:
    """Returns the code of the module's own file; none where it has no such file."""
    loader: Any = getattr(module.__spec__, "loader", None)
    code = loader.get_code(module.__name__) if hasattr(loader, "get_code") else None
    return [code] if isinstance(code, CodeType) else []


def _codes(value: Any) -> list[CodeType]:
    """Returns the code of a function and of those that its decorators have replaced."""
    value = getattr(value, "__func__", value)
    inner = getattr(value, "__wrapped__", None)
    return [*([value.__code__] if isinstance(value, FunctionType) else []), *(_codes(inner) if inner else [])]
