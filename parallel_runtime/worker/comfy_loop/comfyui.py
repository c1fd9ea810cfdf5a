"""Make `import comfy` mean the host's ComfyUI, with the host's flags, on this rank's device."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ...errors import Refused
from ...specs import ComfySetup

VRAM_FLAGS = {"--cpu", "--gpu-only", "--highvram", "--normalvram", "--lowvram", "--novram"}
# What workers do themselves, or without: weights have places here, and graphs and allocators have to agree with NCCL.
OFF = ("--disable-dynamic-vram", "--disable-comfy-compiler")
ON = {"--enable-dynamic-vram", "--enable-comfy-compiler", "--cuda-malloc"}
PACKAGES = ("comfy", "comfy_extras")
EXTRA_NODES = "comfy_extras.nodes_"


def import_comfyui(setup: ComfySetup, device: torch.device) -> None:
    """Raises ImportError where `setup.root` is no ComfyUI, Refused for a version that insists on what is to be `OFF`.

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
    _check_off()


def _check_off() -> None:
    """Only main.py turns dynamic VRAM on, in the versions that we know; the compiler goes by its flag."""
    import comfy.cli_args
    import comfy.memory_management
    import comfy.model_patcher
    import comfyui_version

    args, patcher = comfy.cli_args.args, comfy.model_patcher
    dynamic = getattr(patcher, "ModelPatcherDynamic", ())
    for what, on, flag in (
        ("dynamic VRAM", getattr(comfy.memory_management, "aimdo_enabled", False), OFF[0]),
        ("dynamic VRAM", issubclass(patcher.CoreModelPatcher, dynamic), OFF[0]),
        ("its model compiler", not getattr(args, "disable_comfy_compiler", True), OFF[1]),
        ("its model compiler", getattr(args, "enable_comfy_compiler", False), OFF[1]),
    ):
        if on:
            raise Refused(
                f"ComfyUI {comfyui_version.__version__} has {what} on in a worker, where it must be off; start ComfyUI "
                f"with {flag}, or with another version"
            )


def _check_version(setup: ComfySetup) -> None:
    """Machines have a ComfyUI each."""
    import comfyui_version

    if setup.version not in ("", comfyui_version.__version__):
        raise Refused(
            f"ComfyUI is {setup.version} where it runs, and {comfyui_version.__version__} in {setup.root} on the "
            "machine of this worker; install the same version"
        )


def _flags(setup: ComfySetup, device: torch.device) -> list[str]:
    """The host's, for a worker on this device. ComfyUI lets --cpu stand beside no other flag on video memory."""
    off = [flag for flag in OFF if flag in _known_flags()]
    kept = [flag for flag in setup.flags if flag not in {*OFF, *ON, "--cpu"}]
    if device.type != "cpu":
        return [*kept, *off]
    return ["--cpu", *(flag for flag in kept if flag not in VRAM_FLAGS), *off]


def _known_flags() -> set[str]:
    """ComfyUI parses its flags as it is imported, and ends the process for one that it does not know."""
    import comfy.options

    return set(re.findall(r'"(--[a-z-]+)"', Path(comfy.options.__file__).with_name("cli_args.py").read_text()))


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
