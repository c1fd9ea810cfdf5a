"""What ComfyUI's code reads off a MODEL, a condition and a latent, by its source alone; judged.py says what becomes of
each under a CP Sampler."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

READS = {"get", "pop", "setdefault"}  # methods of a dict
ENCODES = {"encode_token_weights", "reset_clip_options"}  # methods of a text encoder
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


def read_by(comfyui: Path) -> dict[str, set[str]]:
    """What this checkout reads, by the name of its table in judged.py."""
    found = {what: _keys_read(comfyui, *DICTS[what]) - OTHERS[what] for what in DICTS}
    for what, (file, kinds) in ATTRIBUTES.items():
        classes = [kind for kind in _classes(comfyui / file) if kind.name in kinds]
        found[what] = {name for kind in classes for name in attributes_set(kind)}
    for what, (file, name) in NAMES.items():
        (kind,) = (kind for kind in _classes(comfyui / file) if kind.name == name)
        found[what] = {target.id for step in kind.body if isinstance(step, ast.Assign) for target in step.targets}  # type: ignore[attr-defined]  # names of an enumeration
    return found | {"TEXT_ENCODERS": text_encoders(comfyui), "VAES": autoencoders(comfyui)}


def _keys_read(comfyui: Path, names: set[str], files: tuple[str, ...]) -> set[str]:
    paths = {path for pattern in files for path in comfyui.glob(pattern)}
    return {key for path in paths for owner, key in _keys_in(path) if owner in names}


@functools.cache
def _keys_in(path: Path) -> set[tuple[str, str]]:
    return set(keys(ast.parse(path.read_text(encoding="utf-8"))))


def _classes(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef))


def keys(tree: ast.AST) -> Iterator[tuple[str, str]]:
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


def attributes_set(code: ast.AST) -> Iterator[str]:
    """Those that the methods in `code` set on `self`."""
    for node in ast.walk(code):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                yield name


def text_encoders(comfyui: Path) -> set[str]:
    """The classes, as `module.Class`, whose objects may be a CLIP's `cond_stage_model`: they encode tokens and take
    options, or are of such a class. Classes that functions make of these are left out."""
    paths = [*(comfyui / "comfy").glob("s*_clip.py"), *(comfyui / "comfy" / "text_encoders").glob("*.py")]
    kinds = [(path.stem, kind) for path in paths for kind in _classes(path)]
    found: set[str] = set()
    before = -1
    while len(found) > before:
        before = len(found)
        names = {name.rpartition(".")[2] for name in found}
        for module, kind in kinds:
            bases = {ast.unparse(base).rpartition(".")[2] for base in kind.bases}
            methods = {step.name for step in kind.body if isinstance(step, ast.FunctionDef)}
            made_of = (bases & names) - {"SD1ClipModel"}
            if (bases & names or methods >= ENCODES) and not (kind.name.endswith("_") and made_of):
                found.add(f"{module}.{kind.name}")
    return found


def autoencoders(comfyui: Path) -> set[str]:
    """The classes, as `module.Class`, whose objects may be a VAE's `first_stage_model`, with the classes of their
    encoder and decoder in parentheses where these are named beside them."""
    tree = ast.parse((comfyui / "comfy" / "sd.py").read_text(encoding="utf-8"))
    modules = {
        alias.name: f"comfy.{step.module}.{alias.name}"
        for step in tree.body
        if isinstance(step, ast.ImportFrom) and step.level
        for alias in step.names
    }
    found = set()
    for step in ast.walk(tree):
        match step:
            case ast.Assign(targets=[ast.Attribute(attr="first_stage_model")], value=ast.Call(func=made) as call):
                name = ast.unparse(made)
                if name == "self.first_stage_model.eval":
                    continue
                configs = [
                    keyword.value for keyword in call.keywords if keyword.arg in ("encoder_config", "decoder_config")
                ]
                parts = [ast.literal_eval(config.values[0]) for config in configs if isinstance(config, ast.Dict)]
                found.add(modules.get(name, name) + (f"({', '.join(parts)})" if parts else ""))
    return found
