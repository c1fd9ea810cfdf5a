"""CP Load Diffusion Model: a MODEL without weights in ComfyUI's process, for CP samplers and for all others."""

from __future__ import annotations

from typing import Any

import comfy.sd
import folder_paths
from comfy_api.latest import io
from nodes import NODE_CLASS_MAPPINGS  # type: ignore[attr-defined]  # ComfyUI's module, not our package
from safetensors import SafetensorError, safe_open

from ..parallel_runtime import gguf
from ..parallel_runtime.errors import Refused
from ..parallel_runtime.mapped import Mapped, load_mapped
from ..parallel_runtime.specs import ParallelRequest
from .config import CATEGORY, CPConfig, requested
from .evaluation import RemoteEvaluation
from .files import SAFE
from .stand_in import Weightless, weightless


class CPLoadDiffusionModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPLoadDiffusionModel",
            display_name="CP Load Diffusion Model",
            category=CATEGORY,
            description="A MODEL whose weights live in the workers only. CP samplers use it as it is; every other "
            "sampler and guider works on it too, with one round trip to the workers per evaluation.",
            search_aliases=["load diffusion model", "unet loader", "gguf", "multi gpu"],
            inputs=[
                io.Combo.Input(
                    "unet_name", options=[*folder_paths.get_filename_list("diffusion_models"), *_gguf_files()],
                    tooltip="A file in ComfyUI's folder diffusion_models; also .gguf files, where ComfyUI-GGUF is "
                    "installed.",
                ),
                CPConfig.Input(
                    "cp_config", optional=True, tooltip="For other samplers; a CP sampler goes by its own cp_config."
                ),
            ],
            outputs=[io.Model.Output(tooltip="For CP samplers, and for every other one.")],
        )  # fmt: skip

    @classmethod
    def execute(cls, unet_name: str, cp_config: ParallelRequest | None = None) -> io.NodeOutput:
        return io.NodeOutput(load_without_weights(unet_name, requested(cp_config)))


def load_without_weights(name: str, request: ParallelRequest) -> Weightless:
    """The MODEL that ComfyUI's loader makes of a file, its weights views of the file that nobody here reads."""
    init: tuple[Any, ...]
    if name.endswith(".gguf"):
        path = folder_paths.get_full_path_or_raise("unet_gguf", name)
        init = (gguf.load, (Mapped, gguf.pack_folder(NODE_CLASS_MAPPINGS[gguf.NODE]), path))
        patcher = gguf.load(*init[1])
    else:
        path = folder_paths.get_full_path_or_raise("diffusion_models", name)
        init = (comfy.sd.load_diffusion_model, (path, {}))
        check_file(path)
        try:
            patcher = load_mapped(Mapped, *init, None)
        except RuntimeError as error:  # what ComfyUI's loader says of a file that it cannot use
            text = " ".join(str(error).split())
            raise Refused(
                f"ComfyUI cannot load the model in {path}: {text}; take one that Load Diffusion Model can load"
            ) from None
    patcher.cached_patcher_init = init
    return weightless(patcher, RemoteEvaluation(request))


def check_file(path: str) -> None:
    """Raises Refused for a safetensors file that is none, or is damaged."""
    if not path.endswith(SAFE):
        return
    with open(path, "rb") as file:
        if file.read(4) == b"GGUF":
            raise Refused(f"{path} is a GGUF file; give it the ending .gguf, and install ComfyUI-GGUF to load it")
    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise Refused(f"{path} is no sound safetensors file ({error}); download or copy it again") from None


def _gguf_files() -> list[str]:
    """Only where ComfyUI-GGUF is installed."""
    known = gguf.NODE in NODE_CLASS_MAPPINGS and "unet_gguf" in folder_paths.folder_names_and_paths
    return folder_paths.get_filename_list("unet_gguf") if known else []
