"""What `python -m parallel_runtime` says where it cannot begin."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parallel_runtime.commands import COMMANDS

ROOT = Path(__file__).parents[2]
PYTHON = {"PYTHON": sys.executable}


def stderr_of(*arguments: str, bare: bool = False) -> str:
    command = [sys.executable, *(["-S"] if bare else []), "-m", "parallel_runtime", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    return done.stderr


def test_a_python_without_our_packages_is_told_how_to_get_them() -> None:
    output = stderr_of("demo", bare=True)
    assert "torch is not installed" in output
    assert f"-m pip install torch -r {ROOT / 'parallel_runtime' / 'for_diffusers' / 'requirements.txt'}" in output
    assert "Traceback" not in output


def test_a_command_that_is_none_is_told_those_that_are() -> None:
    output = stderr_of("drmo")
    assert output.startswith("there is no command 'drmo'\n")
    assert "usage: python -m parallel_runtime {demo,join,migrate,packs,report}" in output
    assert stderr_of().startswith("usage: ")


def test_a_command_that_has_moved_says_where_it_is() -> None:
    assert stderr_of("networks").startswith("networks is for developers, who run it as python -m tests.networks\n")


def test_help_is_no_failure() -> None:
    command = [sys.executable, "-m", "parallel_runtime", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_needs_nothing_that_is_installed(name: str) -> None:
    command = [sys.executable, "-S", "-m", "parallel_runtime", name, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: python -m parallel_runtime {name} ")


def test_help_of_the_demos_script_installs_nothing(tmp_path: Path) -> None:
    """It is run in a copy, which has no .venv."""
    for name in ("parallel_runtime", "locales/en", ".ci"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    command = [tmp_path / "parallel_runtime" / "demo" / "run.sh", "--prompt", "a star", "-h"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, env=os.environ | PYTHON)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--ring-degree" in done.stdout
    assert not (tmp_path / ".venv").exists()


def test_a_python_that_is_too_old_is_named_before_anything_is_asked_of_it() -> None:
    old = "import runpy, sys; sys.version_info = (3, 9, 2); runpy.run_module('parallel_runtime', run_name='__main__')"
    done = subprocess.run([sys.executable, "-S", "-c", old], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "needs Python 3.11 or newer, such as ComfyUI's own" in done.stderr
    assert f"{sys.executable} is Python 3.9\n" in done.stderr
