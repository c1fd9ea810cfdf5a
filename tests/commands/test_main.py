"""What `python -m parallel_runtime` says where it cannot begin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


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
