"""Make `import comfy` mean the host's ComfyUI, with the host's flags, on this rank's device."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from functools import reduce
from types import ModuleType
from typing import Any

import torch

from ...errors import Refused
from ...specs import ComfySetup

VRAM_FLAGS = {"--cpu", "--gpu-only", "--highvram", "--normalvram", "--lowvram", "--novram"}
PACKAGES = ("comfy", "comfy_extras")
EXTRA_NODES = "comfy_extras.nodes_"


def import_comfyui(setup: ComfySetup, device: torch.device) -> None:
    """Raises ImportError where `setup.root` is no ComfyUI. Dynamic VRAM stays off: only main.py turns it on.

    Its root goes first on the path, as in the host: `import nodes` in ComfyUI's code means its nodes, not ours.
    """
    sys.path.insert(0, setup.root)
    import comfy.options

    _check_version(setup)
    os.chdir(setup.folder)  # flags may name folders from there
    sys.argv = ["main.py", *_flags(setup, device)]
    comfy.options.enable_args_parsing()
    import comfy.cli_args
    import comfy.model_management

    found = comfy.model_management.get_torch_device()
    assert found.type == device.type, f"ComfyUI runs on {found}, this rank on {device}"


def _check_version(setup: ComfySetup) -> None:
    """Machines have a ComfyUI each."""
    import comfyui_version

    if setup.version not in ("", comfyui_version.__version__):
        raise Refused(
            f"ComfyUI is {setup.version} where it runs, and {comfyui_version.__version__} in {setup.root} on the "
            "machine of this worker; install the same version"
        )


def _flags(setup: ComfySetup, device: torch.device) -> list[str]:
    """The host's, for this rank's device. ComfyUI lets --cpu stand beside no other flag on video memory."""
    if device.type != "cpu":
        return [flag for flag in setup.flags if flag != "--cpu"]
    return ["--cpu", *(flag for flag in setup.flags if flag not in VRAM_FLAGS)]


def named(reference: str) -> Any:
    """The class or function that ComfyUI has as `module:name` or `module:Class.name`. Raises Refused for all else."""
    module, _, name = reference.partition(":")
    if module.split(".")[0] in PACKAGES:
        found = reduce(getattr, name.split("."), module_named(module))
        home = getattr(found, "__module__", None) or ""
        if home.split(".")[0] in PACKAGES or home == module_named(module).__name__:
            return found
    raise Refused(f"{reference} is not part of ComfyUI")


def module_named(name: str) -> ModuleType:
    """A module of ComfyUI. As in the host, extra nodes are loaded by file: some import one another in a circle."""
    if not name.startswith(EXTRA_NODES):
        return importlib.import_module(name)
    path = os.path.join(comfy_root(), *name.split("."))
    if path not in sys.modules:
        spec = importlib.util.spec_from_file_location(path, f"{path}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[path] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[path])
    return sys.modules[path]


def comfy_root() -> str:
    import comfy.options

    return os.path.dirname(os.path.dirname(os.path.realpath(comfy.options.__file__)))
