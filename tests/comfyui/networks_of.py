"""What ComfyUI's networks do beside their blocks, and what their blocks take, as names that two versions can be
compared by. Most is read from the source; block arguments are those of the tiny networks of tests/zoo."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from parallel_runtime.architectures import ARCHITECTURES

from .comfy import OUR_ROOT, ComfyInstall
from .reads import attributes_set

Found = dict[str, dict[str, str]]  # by what it is: a name, and what of it may change
WITHOUT_PLAN = "networks without a plan"
_PLANNED = {kind.rpartition(":")[2] for architecture in ARCHITECTURES for kind in architecture.kinds}
_CALLERS = ("comfy/*.py", "comfy_extras/*.py", "nodes.py")


def networks_of(comfy: ComfyInstall) -> Found:
    files = [
        path for path in sorted(comfy.root.glob("comfy/ldm/**/*.py")) if "vae" not in str(path.relative_to(comfy.root))
    ]
    classes = [(path, kind) for path in files for kind in ast.walk(_tree(path)) if isinstance(kind, ast.ClassDef)]
    named = {f"{path.relative_to(comfy.root / 'comfy' / 'ldm')} {kind.name}": kind for path, kind in classes}
    callers = [path for pattern in _CALLERS for path in sorted(comfy.root.glob(pattern))]
    return {
        WITHOUT_PLAN: dict.fromkeys(sorted(_network_classes(comfy.root) - _PLANNED), ""),
        "what others than forward ask of a network": dict.fromkeys(
            sorted({name for path in callers for name in _asked(_tree(path))}), ""
        ),
        "state that a network keeps": dict.fromkeys(
            sorted({f"{name}.{kept}" for name, kind in named.items() for kept in _kept(kind)}), ""
        ),
        "what forward does beside _forward": {name: code for name, kind in named.items() if (code := _beside(kind))},
        **block_arguments(comfy),
    }


def block_arguments(comfy: ComfyInstall) -> Found:
    command = [str(comfy.python), "-m", "tests.zoo.block_arguments"]
    environment = {**os.environ, "COMFYUI_PATH": str(comfy.root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=OUR_ROOT, env=environment)
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _network_classes(comfyui: Path) -> set[str]:
    """Those with which comfy/model_base.py makes its models."""
    given = set()
    for node in ast.walk(_tree(comfyui / "comfy" / "model_base.py")):
        match node:
            case ast.keyword(arg="unet_model", value=ast.Attribute(attr=name)):
                given.add(name)
            case ast.FunctionDef(args=arguments):
                pairs = zip(reversed(arguments.args), reversed(arguments.defaults), strict=False)
                values = [value for argument, value in pairs if argument.arg == "unet_model"]
                given |= {value.attr if isinstance(value, ast.Attribute) else ast.unparse(value) for value in values}
    return given


def _asked(tree: ast.AST) -> Iterator[str]:
    """Attributes and methods, "()", of whatever is called diffusion_model."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Attribute(attr="diffusion_model") | ast.Name(id="diffusion_model"), attr=name):
                yield f"{name}()" if id(node) in called else name


def _kept(kind: ast.ClassDef) -> Iterator[str]:
    """Attributes that methods other than the constructor set."""
    for method in kind.body:
        if isinstance(method, ast.FunctionDef) and method.name not in ("__init__", "reset_parameters"):
            yield from attributes_set(method)


def _beside(kind: ast.ClassDef) -> str:
    """A digest of `forward` where it does more than to have ComfyUI's wrappers around `_forward` called, else ""."""
    methods = {method.name: method for method in kind.body if isinstance(method, ast.FunctionDef)}
    if "_forward" not in methods or "forward" not in methods:
        return ""
    match methods["forward"].body:
        case [ast.Return(value=ast.Call(func=ast.Attribute(attr="execute"), args=given, keywords=named))]:
            values = [*given, *(keyword.value for keyword in named)]
            if all(isinstance(value, ast.Name | ast.Starred) for value in values):
                return ""
    return hashlib.sha256(ast.unparse(methods["forward"]).encode()).hexdigest()[:12]
