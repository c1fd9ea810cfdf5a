"""CP Load Diffusion Model: a MODEL without weights in ComfyUI's process, for CP samplers and for every native one."""

from __future__ import annotations

import weakref

import comfy.model_detection
import comfy.model_management
import comfy.sd
import comfy.utils
import folder_paths
import torch
from comfy.model_base import BaseModel
from comfy_api.latest import io

from ..parallel_runtime.errors import Refused
from ..parallel_runtime.families import recognise
from ..parallel_runtime.families.formats import refuse_quantised
from ..parallel_runtime.families.header import Header, header
from ..parallel_runtime.specs import ParallelRequest
from ..parallel_runtime.stand_in import StandIn
from .config import CATEGORY, CPConfig, requested
from .evaluation import RemoteEvaluation
from .requirements import check_requirements
from .residence import CPU, Hollow

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class CPLoadDiffusionModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPLoadDiffusionModel",
            display_name="CP Load Diffusion Model",
            category=CATEGORY,
            description="A MODEL whose weights live in the workers only. CP samplers use it as it is; every native "
            "sampler and guider works on it too, with one round trip to the workers per evaluation.",
            search_aliases=["load diffusion model", "unet loader", "multi gpu"],
            inputs=[
                io.Combo.Input(
                    "unet_name", options=folder_paths.get_filename_list("diffusion_models"),
                    tooltip="A file in ComfyUI's folder diffusion_models.",
                ),
                CPConfig.Input(
                    "cp_config", optional=True, tooltip="For native samplers; a CP sampler goes by its own cp_config."
                ),
            ],
            outputs=[io.Model.Output(tooltip="For CP samplers, and for every native one.")],
        )  # fmt: skip

    @classmethod
    def execute(cls, unet_name: str, cp_config: ParallelRequest | None = None) -> io.NodeOutput:
        check_requirements()
        path = folder_paths.get_full_path_or_raise("diffusion_models", unet_name)
        return io.NodeOutput(load_without_weights(path, requested(cp_config)))


class Weightless(Hollow):
    """A MODEL whose network is a stand-in; what nodes put in place of its other parts counts, as on any MODEL."""

    def partially_load(self, device_to: torch.device, extra_memory: int = 0, force_patch_weights: bool = False) -> int:
        self.unpatch_model(unpatch_weights=False)  # what another clone put there
        self.patch_model(load_weights=False)
        return super().partially_load(device_to, extra_memory, force_patch_weights)

    def cleanup(self) -> None:
        """ComfyUI is done with the MODEL for now."""
        super().cleanup()
        self.model.diffusion_model.evaluate.settle()

    def detach(self, unpatch_all: bool = True) -> torch.nn.Module:
        if unpatch_all:
            self.unpatch_model(unpatch_weights=False)
        return super().detach(unpatch_all)


def load_without_weights(path: str, request: ParallelRequest) -> Weightless:
    """The MODEL that ComfyUI would make of the file at `path`, with a stand-in for its network. Raises Refused."""
    head = header(path)
    refuse_quantised(head)
    evaluation = RemoteEvaluation(request)
    model = _weightless(path, head, evaluation)
    recognise(head.shapes, model.model_config.unet_config)
    evaluation.model = weakref.ref(model)
    # its workers' memory is counted apart, see residence.py
    patcher = Weightless(model, comfy.model_management.get_torch_device(), CPU, size=1)
    patcher.cached_patcher_init = (comfy.sd.load_diffusion_model, (path, {}))
    return patcher


def _weightless(path: str, head: Header, evaluation: RemoteEvaluation) -> BaseModel:
    """What comfy.sd.load_diffusion_model_state_dict makes of the file, less the network."""
    state = {
        name: torch.empty(shape, dtype=DTYPES[head.dtypes[name]], device="meta") for name, shape in head.shapes.items()
    }
    config = comfy.model_detection.model_config_from_unet(state, "", metadata=dict(head.metadata) or None)
    if config is None:
        raise Refused(f"ComfyUI does not know the model in {path}; take one that Load Diffusion Model can load")
    supported = list(config.supported_inference_dtypes)
    dtype = comfy.model_management.unet_dtype(
        model_params=comfy.utils.calculate_parameters(state),
        supported_dtypes=supported,
        weight_dtype=comfy.utils.weight_dtype(state),
    )
    cast = comfy.model_management.unet_manual_cast(dtype, comfy.model_management.get_torch_device(), supported)
    config.set_inference_dtype(dtype, cast)
    config.unet_config["disable_unet_model_creation"] = True
    model = config.get_model(state, "")
    model.diffusion_model = StandIn(evaluation, dtype, config.unet_config, head.shapes)
    return model
