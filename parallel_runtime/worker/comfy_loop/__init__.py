"""ComfyUI's own sampling loop on this rank, around its own networks. Knows no model family.

Imports the host's ComfyUI as `comfy`, with the host's flags, on this rank's device."""

from __future__ import annotations

import inspect
import os
import sys
from functools import partial
from pathlib import Path

import torch

from ...errors import Refused
from ...jobs import EncodingJob, EvaluationJob, SamplingJob, VAEJob
from ...specs import ComfySetup
from ..models import JobKinds

# Flags that workers are started without, and those that they turn off: they place weights themselves (`--highvram`
# would have ComfyUI load to the GPU, and "offload" to it), and CUDA graphs and allocators must work with NCCL.
VRAM_FLAGS = {"--cpu", "--gpu-only", "--highvram", "--normalvram", "--lowvram", "--novram"}
OFF = ("--disable-dynamic-vram", "--disable-comfy-compiler")
ON = {"--enable-dynamic-vram", "--enable-comfy-compiler", "--cuda-malloc"}


def import_comfyui(setup: ComfySetup, device: torch.device) -> None:
    """Imports the ComfyUI at `setup.root`. Raises ImportError where there is none, Refused for another version than the
    host's or one that does not obey the `OFF` flags.

    Its root goes first on the path, as in the host: `import nodes` in ComfyUI's code means its nodes, not ours."""
    sys.path.insert(0, setup.root)
    sys.path += [os.path.join(setup.root, path) for path in setup.paths]
    import comfy.options
    import comfyui_version

    if setup.version not in ("", comfyui_version.__version__):
        raise Refused("comfyui.version", version=setup.version, other=comfyui_version.__version__, folder=setup.root)
    os.chdir(setup.folder)  # flags may name folders from there
    sys.argv = ["main.py", *_flags(setup, device)]
    comfy.options.enable_args_parsing()
    import comfy.cli_args

    # Each rank would time cuDNN's convolutions for itself, and ranks that choose others get other bits.
    args = comfy.cli_args.args
    args.fast = {feature for feature in args.fast if feature.value != "autotune"}
    import comfy.model_management

    comfy_device = comfy.model_management.get_torch_device()
    assert comfy_device.type == device.type, f"ComfyUI runs on {comfy_device}, this rank on {device}"
    # Only a flag has dynamic VRAM or its compiler on in known versions.
    from ...loading.mapped import has_dynamic_vram

    compiler = not getattr(args, "disable_comfy_compiler", True) or getattr(args, "enable_comfy_compiler", False)
    for what, on, flag in (("dynamic VRAM", has_dynamic_vram(), OFF[0]), ("its model compiler", compiler, OFF[1])):
        if on:
            raise Refused("comfyui.flag", version=comfyui_version.__version__, what=what, flag=flag)


def _flags(setup: ComfySetup, device: torch.device) -> list[str]:
    """Returns the host's flags for a worker on this device."""
    import comfy.options

    known = Path(inspect.getfile(comfy.options)).with_name("cli_args.py").read_text()  # it exits for any other flag
    off = [flag for flag in OFF if f'"{flag}"' in known]
    flags = [flag for flag in setup.flags if flag not in {*OFF, *ON, *VRAM_FLAGS}]
    return [*(["--cpu"] if device.type == "cpu" else []), *flags, *off]


def start(setup: ComfySetup, device: torch.device) -> JobKinds:
    """Imports the host's ComfyUI with the host's flags; returns the kinds of jobs that need it. Call it once, before
    any other import of comfy."""
    import_comfyui(setup, device)
    from ...loading.mapped import note_missing
    from . import additional_models, autoencoder, comfy_model, sampling, text_encoder  # comfy can be imported only now

    note_missing()
    load_model = partial(comfy_model.load, additional_models.AdditionalModels())
    return {
        SamplingJob: (load_model, sampling.run),
        EvaluationJob: (load_model, comfy_model.evaluate),
        VAEJob: (autoencoder.load, partial(autoencoder.run, {})),
        EncodingJob: (text_encoder.load, text_encoder.run),
    }
