"""CP Load Diffusion Model: a MODEL whose weights only the workers read, in every sampler node."""

from __future__ import annotations

import folder_paths
from comfy_api.latest import io
from nodes import NODE_CLASS_MAPPINGS, UNETLoader  # type: ignore[attr-defined]  # ComfyUI's module, not our package
from safetensors import SafetensorError, safe_open

from ...parallel_runtime.errors import Refused
from ...parallel_runtime.loading.mapped import Mapped, load_mapped
from ...parallel_runtime.loading.node_loader import load_by_node
from ...parallel_runtime.request import ParallelRequest
from ..describe.loader_nodes import note_call
from ..describe.model_files import SAFETENSORS
from ..describe.refused_event import announce_refusals
from ..remote.sampling_run import sampled_on_workers
from ..server.settings import request_from
from .cp_config import CATEGORY, CPConfig

GGUF_NODE = "UnetLoaderGGUF"


class CPLoadDiffusionModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPLoadDiffusionModel",
            display_name="CP Load Diffusion Model",
            category=CATEGORY,
            description="A MODEL whose weights are in the workers only: every sampler node, of any pack, samples it "
            "there.",
            search_aliases=["load diffusion model", "unet loader", "gguf", "multi gpu"],
            inputs=[
                io.Combo.Input(
                    "unet_name", options=[*folder_paths.get_filename_list("diffusion_models"), *_gguf_files()],
                    tooltip="A file in ComfyUI's folder diffusion_models; also .gguf files, if ComfyUI-GGUF is "
                    "installed.",
                ),
                io.Combo.Input(
                    "weight_dtype", options=UNETLoader.INPUT_TYPES()["required"]["weight_dtype"][0], optional=True,
                    advanced=True, tooltip="As in Load Diffusion Model. A .gguf file has its own.",
                ),
                CPConfig.Input(
                    "cp_config", optional=True, tooltip="For other samplers; a CP sampler uses its own cp_config."
                ),
            ],
            outputs=[io.Model.Output(tooltip="For CP samplers, and for every other one.")],
        )  # fmt: skip

    @classmethod
    @announce_refusals()
    def execute(
        cls, unet_name: str, weight_dtype: str = "default", cp_config: ParallelRequest | None = None
    ) -> io.NodeOutput:
        return io.NodeOutput(sampled_on_workers(load_for_workers(unet_name, weight_dtype), request_from(cp_config)))


def load_for_workers(name: str, weight_dtype: str) -> Mapped:
    """Returns ComfyUI's MODEL of a file, as Load Diffusion Model loads it. Its weights are views of the mapped file, of
    which only samples are read."""
    if name.endswith(".gguf"):
        if weight_dtype != "default":
            raise Refused("file.gguf.dtype", "weight_dtype", {"weight_dtype": "default"}, dtype=weight_dtype)
        inputs = {"unet_name": name}
        (patcher,) = load_by_node(Mapped, NODE_CLASS_MAPPINGS[GGUF_NODE], inputs)
        note_call(patcher.model, GGUF_NODE, inputs)
        return patcher
    path = folder_paths.get_full_path_or_raise("diffusion_models", name)
    check_file(path)
    try:
        return load_mapped(Mapped, UNETLoader().load_unet, (name, weight_dtype), 0)
    except RuntimeError as error:  # ComfyUI's loader raises it for a file that it cannot use
        raise Refused("file.unloadable", path=path, reason=" ".join(str(error).split())) from None


def check_file(path: str) -> None:
    """Raises Refused for a damaged file, or one of another format, under the name of a safetensors file."""
    if not path.endswith(SAFETENSORS):
        return
    with open(path, "rb") as file:
        if file.read(4) == b"GGUF":
            raise Refused("file.gguf", path=path)
    try:
        with safe_open(path, framework="pt"):
            pass
    except SafetensorError as error:
        raise Refused("file.unsound", path=path, error=str(error)) from None


def _gguf_files() -> list[str]:
    """Returns the names of .gguf files; none where ComfyUI-GGUF is not installed."""
    installed = GGUF_NODE in NODE_CLASS_MAPPINGS and "unet_gguf" in folder_paths.folder_names_and_paths
    return folder_paths.get_filename_list("unet_gguf") if installed else []
