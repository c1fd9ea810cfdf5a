"""The page's modules agree with the frontend's published types."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / "tests" / "web"


def test_the_pages_modules_have_no_type_errors(tmp_path: Path) -> None:
    """Laid out as ComfyUI serves them: extensions/PACK/*.js beside scripts/."""
    modules = TOOLS / "node_modules"
    if not modules.is_dir() or shutil.which("node") is None:
        pytest.skip("NO TYPES: npm install --prefix tests/web")
    shutil.copytree(ROOT / "web", tmp_path / "extensions" / "pack", ignore=shutil.ignore_patterns("docs"))
    shutil.copytree(TOOLS / "scripts", tmp_path / "scripts")
    shutil.copy(TOOLS / "tsconfig.json", tmp_path)
    (tmp_path / "node_modules").symlink_to(modules)
    command = ["node", str(modules / "typescript" / "bin" / "tsc"), "-p", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout
