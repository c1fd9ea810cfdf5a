"""Which names of ComfyUI's modules our code uses, and which of them a checkout lacks. Imports nothing of ComfyUI."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from .comfy import OUR_ROOT

PACKAGES = {"comfy", "comfy_api", "comfy_execution", "comfy_extras", "comfyui_version", "execution", "folder_paths",
            "latent_preview", "nodes", "server"}  # fmt: skip
OURS = ("nodes/**/*.py", "parallel_runtime/**/*.py")


def missing_names(comfyui: Path) -> list[str]:
    """Dotted names that we use and that this checkout's modules do not define, with the modules that are gone."""
    return sorted(name for name in used_names() if not _has(comfyui, name.split(".")))


@functools.cache
def used_names() -> frozenset[str]:
    """Such as `comfy.model_management.free_memory`, of every module that we import or read an attribute of."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for pattern in OURS for path in OUR_ROOT.glob(pattern))
    return frozenset(name for tree in trees for name in names_in(tree) if name.split(".")[0] in PACKAGES)


def names_in(tree: ast.AST) -> Iterator[str]:
    """Dotted names of what is imported, and of attributes of modules that are imported as a whole."""
    bound = {}  # the dotted name of each name in the file
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=imported):
                yield from (alias.name for alias in imported)
                packages = [alias.name.split(".")[0] for alias in imported if not alias.asname]
                bound |= dict(zip(packages, packages, strict=True))
            case ast.ImportFrom(module=str(module), names=imported, level=0):
                yield from (f"{module}.{alias.name}" for alias in imported)
                bound |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in imported}
    attributes = (_dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    for first, dot, rest in (name.partition(".") for name in attributes if not name.endswith("__")):
        if first in bound:
            yield bound[first] + dot + rest


def _dotted(node: ast.expr) -> str:
    """ "a.b.c" of the expression a.b.c, "" of one that starts with something else than a name."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=owner, attr=name) if start := _dotted(owner):
            return f"{start}.{name}"
    return ""


def _has(comfyui: Path, parts: list[str]) -> bool:
    """Whether the longest module that `parts` begin with defines the part behind it, where there is one."""
    for length in range(len(parts), 0, -1):
        path = comfyui.joinpath(*parts[:length])
        for file in path.with_name(f"{path.name}.py"), path / "__init__.py":
            if file.is_file():
                return length == len(parts) or parts[length] in _defined(file)
        if path.is_dir():
            return length == len(parts)
    return False


@functools.cache
def _defined(file: Path) -> frozenset[str]:
    return frozenset(_names_defined(ast.parse(file.read_text(encoding="utf-8"))))


def _names_defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.alias(name=name, asname=other):
                yield (other or name).split(".")[0]
