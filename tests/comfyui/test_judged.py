"""A later ComfyUI that reads one thing more off a MODEL, a condition or a latent has somebody judge it (judged.py)."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import judged
from .comfy import ComfyInstall

READS = {"get", "pop", "setdefault"}  # methods of a dict
READS_A_COND = "get_models_from_cond"  # a function that is called with a list of conditions and a key
LOOP = ("comfy/samplers.py", "comfy/sampler_helpers.py")
RUNS = (  # code that runs on a MODEL, and makes what lies on it: no loaders, encoders or decoders
    *LOOP, "comfy/context_windows.py", "comfy/hooks.py", "comfy/model_base.py", "comfy/model_patcher.py",
    "comfy/model_prefetch.py", "comfy/multigpu.py", "comfy/patcher_extension.py", "comfy/sample.py",
    "comfy/gligen.py", "comfy/k_diffusion/*.py", "comfy/extra_samplers/*.py", "comfy/ldm/**/*.py", "comfy_extras/*.py",
    "nodes.py",
)  # fmt: skip
SAMPLE = ("nodes.py", "comfy/sample.py", "comfy_extras/nodes_custom_sampler.py")
DICTS = {  # the names under which ComfyUI's code has each, and where
    "MODEL_OPTIONS": ({"model_options", "extra_model_options"}, RUNS),
    "TRANSFORMER_OPTIONS": ({"transformer_options", "extra_options", "to"}, RUNS),
    "CONDITION": ({"c", "cond", "conds", "kk", "modified", "n", "smallest", "temp", "x"}, LOOP),
    "MODEL_CONDITION": ({"kwargs"}, ("comfy/model_base.py",)),
    "LATENT": ({"latent", "input_latent"}, SAMPLE),
}
OTHERS = {  # such names for something else: guidance's prompts, a sampler's callback, one evaluation
    "MODEL_OPTIONS": set(),
    "TRANSFORMER_OPTIONS": set(),
    "CONDITION": {"positive", "negative", "denoised", "i", "sigma", "sigma_hat", "x", "transformer_options"},
    "MODEL_CONDITION": set(),
    "LATENT": set(),
}
ATTRIBUTES = {
    "PATCHER": ("comfy/model_patcher.py", {"ModelPatcher", "ModelPatcherDynamic"}),
    "GUIDER": ("comfy/samplers.py", {"CFGGuider"}),
}
NAMES = {
    "WRAPPERS": ("comfy/patcher_extension.py", "WrappersMP"),
    "CALLBACKS": ("comfy/patcher_extension.py", "CallbacksMP"),
    "HOOKS": ("comfy/hooks.py", "EnumHookType"),
}


@pytest.mark.parametrize("what", DICTS)
def test_every_key_that_comfyui_reads_is_judged(comfy: ComfyInstall, what: str) -> None:
    names, files = DICTS[what]
    paths = {path for pattern in files for path in comfy.root.glob(pattern)}
    read = {key for path in paths for owner, key in _keys_in(path) if owner in names}
    assert read - OTHERS[what] == getattr(judged, what).keys()


@pytest.mark.parametrize("what", ATTRIBUTES)
def test_every_attribute_that_comfyui_sets_is_judged(comfy: ComfyInstall, what: str) -> None:
    file, kinds = ATTRIBUTES[what]
    classes = [kind for kind in _classes(comfy.root / file) if kind.name in kinds]
    assert {name for kind in classes for name in _attributes(kind)} == getattr(judged, what).keys()


@pytest.mark.parametrize("what", NAMES)
def test_every_kind_that_comfyui_knows_is_judged(comfy: ComfyInstall, what: str) -> None:
    file, name = NAMES[what]
    (kind,) = (kind for kind in _classes(comfy.root / file) if kind.name == name)
    assigned = {target.id for step in kind.body if isinstance(step, ast.Assign) for target in step.targets}
    assert assigned == getattr(judged, what).keys()


def test_a_key_is_seen_however_it_is_read() -> None:
    code = """
d["item"]; d.get("get", 1); d.pop("pop"); d.setdefault("default", {}); "contains" in d; "lacks" not in d
self.d["of an object"]; f(y["d"]["nested"]); y.get("d", {})["got"]; d.copy()["copied"]; d[name]; e["another"]
get_models_from_cond(conds[k], "model")
"""
    read = {*_keys(ast.parse(code))}
    assert ("cond", "model") in read
    assert {key for owner, key in read if owner == "d"} == {
        "item", "get", "pop", "default", "contains", "lacks", "of an object", "nested", "got", "copied"
    }  # fmt: skip


@functools.cache
def _keys_in(path: Path) -> set[tuple[str, str]]:
    return set(_keys(ast.parse(path.read_text(encoding="utf-8"))))


def _classes(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef))


def _keys(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(name of a dict, key) of every place that reads or sets a key that is spelled out."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=owner, slice=ast.Constant(value=str(key))):
                yield _name(owner), key
            case ast.Call(func=ast.Attribute(value=owner, attr=method), args=[ast.Constant(value=str(key)), *_]):
                if method in READS:
                    yield _name(owner), key
            case ast.Call(func=ast.Name(id=called), args=[_, ast.Constant(value=str(key))]) if called == READS_A_COND:
                yield "cond", key
            case ast.Compare(left=ast.Constant(value=str(key)), ops=[ast.In() | ast.NotIn()], comparators=[owner]):
                yield _name(owner), key


def _name(owner: ast.expr) -> str:
    """What a dict is called: the variable's or attribute's name, or the key under which another dict has it."""
    match owner:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=str(name))):
            return name
        case ast.Call(func=ast.Attribute(attr="copy", value=copied)):
            return _name(copied)
        case ast.Call(func=ast.Attribute(), args=[ast.Constant(value=str(name)), *_]):
            return name
    return ""


def _attributes(kind: ast.ClassDef) -> Iterator[str]:
    """That its methods set on `self`."""
    for node in ast.walk(kind):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name
