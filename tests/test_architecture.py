"""Who may import whom. The layers are the design; this test is what keeps them."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RUNTIME = ROOT / "parallel_runtime"
COMFY = {"comfy", "comfy_api", "comfy_extras", "comfy_execution", "folder_paths", "server", "execution"}
HEAVY = {"diffusers", "transformers", "for_diffusers"}
WITH_DIFFUSERS = ("for_diffusers/", "demo/transformer.py", "report/diffusers_own.py", "worker/demo_loop.py")
BOTH_SIDES = {"mapped", "gguf"}  # what the host's ComfyUI and the workers' load models with
LAYERS = {path.stem for path in RUNTIME.iterdir() if path.is_dir() or path.suffix == ".py"} - {"__init__", "__main__"}
FORBIDDEN = {
    "wire": COMFY | HEAVY | BOTH_SIDES | {"host", "worker"},
    "host": COMFY | HEAVY | BOTH_SIDES | {"worker"},
    "networks": COMFY | HEAVY | {"torch"} | LAYERS - {"plan"},
    "worker": COMFY | BOTH_SIDES | {"host"},
    "for_diffusers": COMFY | BOTH_SIDES | {"host", "demo", "demo_loop"},
    "worker/comfy_loop": HEAVY | {"host", "engine"},
    "demo": COMFY | BOTH_SIDES | {"worker"},
}
ALLOWED = {"worker/comfy_loop": COMFY | BOTH_SIDES}
SOURCES = sorted(path for folder in (RUNTIME, ROOT / "nodes") for path in folder.rglob("*.py"))


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_layer_imports_only_what_it_may(layer):
    for path in (RUNTIME / layer).rglob("*.py"):
        place = str(path.relative_to(RUNTIME))
        allowed = {name for prefix, names in ALLOWED.items() if place.startswith(prefix) for name in names}
        reached = imported(path) & (FORBIDDEN[layer] - allowed)
        assert not reached, f"{place} imports {reached}"


def test_beside_the_layers_only_what_loads_models_knows_comfyui():
    knowing = {path.stem for path in RUNTIME.glob("*.py") if imported(path) & (COMFY | HEAVY)}
    assert knowing == BOTH_SIDES


def test_diffusers_has_a_room_and_the_demo_and_is_imported_nowhere_else():
    knowing = {place_of(path) for path in SOURCES if imported(path) & HEAVY}
    assert not [place for place in knowing if not place.startswith(WITH_DIFFUSERS)]


def test_what_samples_in_comfyui_is_imported_without_diffusers():
    """Both halves of it; ComfyUI's own modules are those of its tests."""
    ours = [path for layer in ("host", "wire", "networks", "worker") for path in (RUNTIME / layer).rglob("*.py")]
    mine = [path for path in ours if not place_of(path).startswith((*WITH_DIFFUSERS, "worker/comfy_loop/"))]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in mine if "__" not in path.stem]
    script = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(*sys.modules)"
    command = [sys.executable, "-c", script, *modules]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300).stdout.split()
    assert "parallel_runtime.worker.serve" in found
    assert not HEAVY & {part for name in found for part in name.split(".")}


def test_nodes_know_only_the_host_side():
    for path in (ROOT / "nodes").rglob("*.py"):
        assert not imported(path) & (HEAVY | {"worker", "wire"}), path.name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_has_one_noun(path):
    assert len(path.read_text().splitlines()) <= 400
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in ("define_schema",):
            assert (node.end_lineno or 0) - node.lineno < 60, f"{node.name} is long"


def test_files_that_the_design_names_are_there():
    folders = (RUNTIME, ROOT / "nodes", ROOT / "tests")
    there = [f"/{path.relative_to(ROOT)}" for folder in folders for path in folder.rglob("*.py")]
    named = re.findall(r"`([\w/]+\.py)`", (RUNTIME / "DESIGN.md").read_text())
    assert named
    assert not [name for name in named if not any(path.endswith(f"/{name}") for path in there)]


def test_nothing_pickles_evaluates_or_swallows():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), path
            if isinstance(node, ast.ExceptHandler) and path.name != "serve.py":
                assert node.type is not None, path
                assert not (isinstance(node.type, ast.Name) and node.type.id == "Exception"), path
        assert not imported(path) & {"pickle", "cloudpickle", "dill", "shared_memory"}, path


def place_of(path: Path) -> str:
    return str(path.relative_to(RUNTIME if path.is_relative_to(RUNTIME) else ROOT))


def imported(path: Path) -> set[str]:
    """Every name that occurs in the dotted paths this file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            names.update((node.module or "").split("."))
            if not node.module:
                names.update(alias.name for alias in node.names)
    return names
