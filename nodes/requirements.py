"""The one package that ComfyUI does not bring: diffusers. Looked for, never imported, in ComfyUI's process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys

from ..parallel_runtime.errors import Refused

DIFFUSERS = "diffusers>=0.42.1,<0.43"


def check_requirements() -> None:
    """Raises Refused, with the command to run, where diffusers is missing or of another version."""
    way_out = f'Install it into ComfyUI\'s Python and restart: "{sys.executable}" -m pip install "{DIFFUSERS}"'
    if importlib.util.find_spec("diffusers") is None:
        raise Refused(f"CP Sampler needs the package diffusers, which is not installed. {way_out}")
    version = importlib.metadata.version("diffusers")
    if tuple(int(part) for part in version.split(".")[:2]) != (0, 42):
        raise Refused(f"CP Sampler needs {DIFFUSERS}, and diffusers {version} is installed. {way_out}")
