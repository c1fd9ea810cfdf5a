"""Who may import whom. The rooms are the design; this test is what keeps them."""

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RUNTIME = ROOT / "parallel_runtime"
ROOMS = (  # arrows only go down this list
    "nodes",
    "commands",
    "explain",
    "group",
    "planning",
    "worker",
    "for_diffusers",
    "demo",
    "engine",
    "architectures",
    "loading",
    "wire",
)
INSIDE = {  # likewise, folders inside a room; "" are the files beside them
    "nodes": ("", "classes", "remote", "describe"),
    "engine": ("", "rows", "attention", "split", "comm"),
}
LOOSE = ("jobs", "accelerators", "specs", "request", "errors")  # below all rooms
COMFY = {"comfy", "comfy_api", "comfy_extras", "comfy_execution", "folder_paths", "server", "execution"}
DIFFUSERS = {"diffusers", "transformers"}
WITH_COMFY = ("nodes/", "worker/comfy_loop/", "loading/", "commands/report.py")
WITH_DIFFUSERS = ("for_diffusers/", "demo/transformer.py")
NEVER_MEET = {"worker", "engine", "for_diffusers", "loading"}  # what the ComfyUI side of a group must not import
SOURCES = sorted(path for folder in (RUNTIME, ROOT / "nodes") for path in folder.rglob("*.py"))


def test_imports_only_go_down_the_list_of_rooms() -> None:
    for path, target in imports():
        rooms, target_rooms = rooms_of(path), rooms_of(target)
        assert place(target_rooms[0]) >= place(rooms[0]), f"{path} imports {target}"
        if rooms[0] in ("group", "planning", "explain"):
            assert target_rooms[0] not in NEVER_MEET, f"{path} imports {target}"
        if rooms[0] == "nodes":
            assert target_rooms[0] not in {"worker", "engine", "for_diffusers", "wire"}, f"{path} imports {target}"


@pytest.mark.parametrize("room", INSIDE)
def test_imports_between_the_folders_of_a_room_go_down_too_so_there_is_no_circle(room: str) -> None:
    folder = ROOT / room if room == "nodes" else RUNTIME / room
    assert {path.parent.name for path in folder.glob("*/__init__.py")} == {*INSIDE[room]} - {""}
    for path, target in imports():
        if rooms_of(path)[0] == rooms_of(target)[0] == room:
            below, above = (INSIDE[room].index((*rooms_of(file), "")[1]) for file in (target, path))
            assert below >= above, f"{path} imports {target}"


def test_plans_of_architectures_need_no_torch() -> None:
    for path in (RUNTIME / "architectures").glob("*.py"):
        assert path.stem == "network_modules" or "torch" not in imported(path), path


def test_every_room_is_in_the_list_and_says_in_one_docstring_what_it_is() -> None:
    folders = {path.name for path in RUNTIME.iterdir() if (path / "__init__.py").exists()}
    assert folders == set(ROOMS) - {"nodes"}
    assert {path.stem for path in RUNTIME.glob("*.py")} - {"__init__", "__main__"} == set(LOOSE)
    for path in SOURCES:
        if path.name == "__init__.py":
            assert ast.get_docstring(tree(path)), path


def test_nothing_that_was_written_for_people_is_taken_apart_by_patterns() -> None:
    """Refusals, deaths and what torchrun knows are data: codes and values, a Cause, a message."""
    assert [place_of(path) for path in SOURCES if "re" in imported(path)] == []


def test_no_file_name_is_used_twice() -> None:
    names = Counter(path.name for path in SOURCES if path.stem not in ("__init__", "__main__"))
    assert [name for name, count in names.items() if count > 1] == []


def test_only_four_places_know_comfyui_and_two_diffusers() -> None:
    for path in SOURCES:
        name = place_of(path)
        assert name.startswith(WITH_COMFY) or not imported(path) & COMFY, name
        assert name.startswith(WITH_DIFFUSERS) or not imported(path) & DIFFUSERS, name


def test_what_samples_in_comfyui_is_imported_without_diffusers() -> None:
    """Both halves of it; ComfyUI's own modules are those of its tests."""
    ours = [path for room in ("group", "planning", "explain", "wire", "architectures", "worker", "engine")
            for path in (RUNTIME / room).rglob("*.py")]  # fmt: skip
    mine = [path for path in ours if not place_of(path).startswith((*WITH_DIFFUSERS, "worker/comfy_loop/"))]
    mine = [path for path in mine if path.name != "demo_loop.py"]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in mine if "__" not in path.stem]
    script = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(*sys.modules)"
    command = [sys.executable, "-c", script, *modules]
    loaded = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300).stdout.split()
    assert "parallel_runtime.worker.serve" in loaded
    assert not DIFFUSERS & {part for name in loaded for part in name.split(".")}


def test_files_have_at_most_400_lines_and_functions_60() -> None:
    for path in SOURCES:
        assert len(path.read_text().splitlines()) <= 400, path
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in ("define_schema",):
                assert (node.end_lineno or 0) - node.lineno < 60, f"{path}: {node.name} is long"


def test_files_that_the_design_names_are_there() -> None:
    folders = (RUNTIME, ROOT / "nodes", ROOT / "tests")
    files = [f"/{path.relative_to(ROOT)}" for folder in folders for path in folder.rglob("*.py")]
    pages = [ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs" / "mechanisms").glob("*.md")]
    for document in pages:
        named = re.findall(r"`([\w/]+\.py)`", document.read_text())
        assert not [name for name in named if not any(path.endswith(f"/{name}") for path in files)], document


def test_the_map_is_short_and_each_answer_of_it_is_one_line() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert len(text.encode()) <= 10_000
    answers = text.partition("## Where do I change what")[2].splitlines()
    assert [line for line in answers if len(line) > 160] == []


def test_nothing_pickles_evaluates_or_swallows() -> None:
    for path in SOURCES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec"), path
            if isinstance(node, ast.ExceptHandler) and path.name != "serve.py":
                assert node.type is not None, path
                assert not (isinstance(node.type, ast.Name) and node.type.id == "Exception"), path
        assert not imported(path) & {"pickle", "cloudpickle", "dill", "shared_memory"}, path


def test_no_module_of_comfyui_is_asked_for_its_own_name_or_file() -> None:
    """comfy-import-guard, which checks packs, says of these that ComfyUI lacks them, and that the pack will break."""
    for path in (*SOURCES, *(ROOT / "tests").rglob("*.py")):
        attributes = (node for node in ast.walk(tree(path)) if isinstance(node, ast.Attribute))
        asked = [ast.unparse(node) for node in attributes if node.attr in ("__file__", "__name__", "__path__")]
        assert not [name for name in asked if name.startswith("comfy.")], path


@cache
def imports() -> list[tuple[Path, Path]]:
    """Every file with each file of ours that it imports."""
    return [(path, target) for path in SOURCES for target in ours_imported(path)]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def place_of(path: Path) -> str:
    """A source file relative to parallel_runtime, or, of a node, to the repository."""
    return str(path.relative_to(RUNTIME if path.is_relative_to(RUNTIME) else ROOT))


def rooms_of(path: Path) -> tuple[str, ...]:
    """("engine", "attention"), ("nodes", "classes"), or ("",) for a file beside the rooms."""
    parts = path.relative_to(RUNTIME if path.is_relative_to(RUNTIME) else ROOT).parts[:-1]
    return parts or ("",)


def place(room: str) -> int:
    """How far down the list; a file beside the rooms is below all of them, but for the package's own entry."""
    return ROOMS.index(room) if room in ROOMS else len(ROOMS)


def ours_imported(path: Path) -> set[Path]:
    """The files of ours that a file imports."""
    if path.name == "__main__.py":
        return set()
    package = list(path.relative_to(ROOT).parts[:-1])
    files = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (node.module or "").split(".") * bool(node.module)
            for alias in node.names:
                folder = ROOT.joinpath(*base)
                candidates = folder / f"{alias.name}.py", folder.with_suffix(".py"), folder / "__init__.py"
                files.add(next(file for file in candidates if file.exists()))
    return files


def imported(path: Path) -> set[str]:
    """Every name that occurs in the dotted paths of foreign packages that this file imports."""
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names.update(part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.update((node.module or "").split("."))
    return names
