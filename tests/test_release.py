"""What the Comfy Registry and the people there want of this repository, and that nothing is published without it."""

from __future__ import annotations

import json
import re
import runpy
import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from parallel_runtime import OLDEST, TESTED

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
REQUIREMENTS = (ROOT / "requirements.txt").read_text().split()
FORMS = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]


def lacks(project: dict[str, Any], changelog: str = "## [1.2.3] - 2026-11-22", tag: str | None = None) -> list[str]:
    return runpy.run_path(str(ROOT / ".ci" / "release"))["lacks"](project, changelog, REQUIREMENTS, tag)


def complete() -> dict[str, Any]:
    project = deepcopy(PROJECT)
    project["project"]["version"] = "1.2.3"
    project["project"]["urls"]["Repository"] = project["tool"]["comfy"]["Icon"] = "https://example.com/pack"
    project["tool"]["comfy"]["PublisherId"] = "someone"
    return project


def test_a_complete_project_lacks_nothing():
    assert lacks(complete(), tag="v1.2.3") == []


@pytest.mark.parametrize(
    ("place", "name", "value", "message"),
    [
        ("urls", "Repository", "", "Repository"),
        ("comfy", "PublisherId", "", "PublisherId"),
        ("comfy", "Icon", "", "Icon"),
        ("project", "version", "1.2", "three numbers"),
        ("project", "version", "1.2.4", "[1.2.4] in CHANGELOG.md"),
        ("project", "dependencies", ["diffusers"], "requirements.txt"),
    ],
)
def test_what_is_missing_is_said_by_name(place, name, value, message):
    project = complete()
    {"urls": project["project"]["urls"], "comfy": project["tool"]["comfy"], "project": project["project"]}[place][
        name
    ] = value
    assert any(message in line for line in lacks(project))


def test_another_tag_is_not_published():
    (line,) = lacks(complete(), tag="v9.9.9")
    assert "v1.2.3, not v9.9.9" in line


def test_the_address_is_set_in_one_place_and_the_readmes_command_is_one(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    for address in ("https://example.com/first", "https://example.com/second"):
        runpy.run_path(str(ROOT / ".ci" / "release"))["named"](address, tmp_path)
        assert tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["urls"]["Repository"] == address
        (command,) = re.findall(r"^git clone .+$", (tmp_path / "README.md").read_text(), re.MULTILINE)
        assert command == f"git clone {address} context-parallel-sampler"


def test_the_readme_is_a_first_page():
    assert len((ROOT / "README.md").read_bytes()) <= 9_000


def test_the_registry_can_read_the_project():
    about = PROJECT["project"]
    assert re.fullmatch(r"[a-z][a-z0-9]*([-_.][a-z0-9]+)*", about["name"])
    assert "comfyui" not in about["name"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", about["version"])
    assert (ROOT / about["license"]["file"]).is_file()
    assert {"Operating System :: POSIX :: Linux", "Environment :: GPU :: NVIDIA CUDA"} <= set(about["classifiers"])
    assert about["dependencies"] == REQUIREMENTS
    assert PROJECT["tool"]["comfy"]["requires-comfyui"] == f">={OLDEST}"
    assert f"tag=v{TESTED}\n" in (ROOT / ".ci" / "comfyui").read_text()
    assert 'width="400" height="400"' in (ROOT / "web" / "icon.svg").read_text(), "the registry takes no larger one"


def test_the_registry_gets_what_users_reach_and_no_tests():
    """The demo's command works there too; README's other one is for a git clone."""
    left_out = (ROOT / ".comfyignore").read_text().split()
    assert left_out == [".github/", "tests/"]
    product = [path for layer in ("nodes", "parallel_runtime") for path in (ROOT / layer).rglob("*.py")]
    assert not [path for path in product if re.search(r"^\s*(from|import) tests\b", path.read_text(), re.MULTILINE)]
    assert "tests" not in (ROOT / "parallel_runtime" / "demo" / "run.sh").read_text()


def test_what_the_readmes_commands_install_stands_in_one_list_each():
    assert "optional-dependencies" not in PROJECT["project"], "the pack is no package that pip installs"
    for command in ("tests/run", "parallel_runtime/demo/run.sh"):
        (listed,) = re.findall(r"^\.ci/setup (.+)$", (ROOT / command).read_text(), re.MULTILINE)
        assert (ROOT / listed).is_file()


def test_ci_keeps_pytorch_and_comfyui_between_runs():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    (cached,) = re.findall(r"uses: actions/cache@v\d\n +with:\n +path: \|\n((?: {12}.+\n)+) +key: (.+)", workflow)
    assert {"~/.cache/pip", ".comfyui"} <= set(cached[0].split())
    read = re.findall(r"'([^']+)'", cached[1])
    assert {".ci/setup", ".ci/comfyui"} <= set(read), "their versions stand there"
    assert all((ROOT / name).is_file() for name in read)
    assert workflow.index("actions/cache") < workflow.index("run: .ci/run")


def test_ci_runs_what_the_readme_tells_and_a_release_is_looked_at_first():
    assert "run: .ci/run\n" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    release = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert release.index(".ci/release") < release.index("Comfy-Org/publish-node-action")


def test_the_forms_for_issues_ask_for_diagnostics():
    assert FORMS
    for form in FORMS:
        assert "Copy diagnostics" in form.read_text(), form.name


def test_every_symptom_has_a_page_and_every_page_is_found():
    index = ROOT / "docs" / "troubleshooting" / "README.md"
    linked = re.findall(r"\]\(([\w-]+\.md)\)", index.read_text())
    assert set(linked) == {path.name for path in index.parent.glob("*.md")} - {index.name}


def test_every_page_is_reached_from_the_readme_and_no_link_is_dead():
    reached, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        reached.add(page)
        for target, heading in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            aim = (page.parent / target.strip("<>")).resolve() if target else page
            assert aim.exists(), (page.name, target)
            assert not heading or heading in anchors(aim), (page.name, target, heading)
            if aim.suffix == ".md" and aim not in reached:
                left.append(aim)
    assert set((ROOT / "docs").rglob("*.md")) <= reached


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_help_page_names_every_option():
    table = (ROOT / "web" / "docs" / "CPParallelConfig.md").read_text().split("| output |")[0]
    options = set(json.loads((ROOT / "locales" / "de" / "nodeDefs.json").read_text())["CPParallelConfig"]["inputs"])
    assert options == set(re.findall(r"^\| (\w+) \|", table, re.MULTILINE)) - {"input"}
