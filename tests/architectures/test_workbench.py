"""The commands for who adds a network, on the file that the README shows."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from ..comfyui.comfy import find_comfy, why_there_is_none

ROOT = Path(__file__).parents[2]
README = ROOT / "parallel_runtime" / "architectures" / "README.md"


def command(action: str, folder: Path, code: str) -> str:
    comfy = find_comfy()
    if comfy is None:
        pytest.skip(why_there_is_none())
    subject = folder / "my_network.py"
    subject.write_text(code)
    words = [str(comfy.python), "-m", "tests.networks", action, str(subject), "--comfyui", str(comfy.root)]
    done = subprocess.run(
        words, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300
    )
    return f"{done.stdout}returned {done.returncode}"


def shown() -> str:
    return README.read_text().split("```python")[1].split("```")[0]


def test_a_draft_has_the_streams_and_what_goes_along_with_them(tmp_path: Path) -> None:
    output = command("draft", tmp_path, shown())
    assert "# comfy.ldm.wan.model:WanModel" in output
    assert "'x': Split(('image',))" in output.replace('"', "'")
    assert "'freqs': SplitLike(('image',))" in output.replace('"', "'")
    assert re.search(r"unsplit_args=.*context", output)


@pytest.mark.sweep
def test_the_plan_there_is_is_exact(tmp_path: Path) -> None:
    output = command("check", tmp_path, shown())
    assert len(re.findall(r"e-0[67] of the largest|0\.0e\+00 of the largest", output)) == 4, output
    assert output.endswith("returned 0")


def test_a_class_without_a_plan_is_named(tmp_path: Path) -> None:
    code = shown() + "\nclass Other(WanModel):\n    def forward(self, *args, **kwargs):\n        return args\n"
    output = command("check", tmp_path, code.replace("return WanModel(", "return Other("))
    assert "no plan for subject:Other is registered" in output
    assert output.endswith("returned 1")
