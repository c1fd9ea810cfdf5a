"""Where ComfyUI is, which python runs it, and on what. Imports nothing of it."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

OUR_ROOT = Path(__file__).absolute().parents[2]
DEVICE = os.environ.get("CP_TEST_DEVICE", "cpu")  # or the number of a GPU that ComfyUI and all workers share


@dataclass(frozen=True, kw_only=True)
class ComfyInstall:
    root: Path
    python: Path

    @property
    def version(self) -> str:
        text = (self.root / "comfyui_version.py").read_text()
        return text.partition('__version__ = "')[2].partition('"')[0]


def install_at(path: Path) -> ComfyInstall:
    root = path.expanduser().absolute()
    return ComfyInstall(root=root, python=_python_of(root))


def find_comfy() -> ComfyInstall | None:
    root = next(filter(_is_comfy, _candidates()), None)
    return install_at(root) if root else None


def why_there_is_none() -> str:
    looked = ", ".join(str(path) for path in _candidates())
    return f"NO COMFYUI: looked at {looked}; set COMFYUI_PATH to a checkout (and COMFYUI_PYTHON to its python)"


def _candidates() -> list[Path]:
    if path := os.environ.get("COMFYUI_PATH"):
        return [Path(path).expanduser().absolute()]
    around_us = [OUR_ROOT.parent.parent] if OUR_ROOT.parent.name == "custom_nodes" else []
    fetched = OUR_ROOT / ".comfyui" / "ComfyUI"  # by .ci/comfyui
    return [*around_us, Path("~/comfy/ComfyUI").expanduser(), fetched]


def _is_comfy(path: Path) -> bool:
    return (path / "main.py").is_file() and (path / "comfy" / "cli_args.py").is_file()


def _python_of(root: Path) -> Path:
    if python := os.environ.get("COMFYUI_PYTHON"):
        return Path(python).expanduser().absolute()
    usual = (root / venv / "bin" / "python" for venv in (".venv", "venv"))
    return next((path for path in usual if path.exists()), Path(sys.executable))
