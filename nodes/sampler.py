"""The CP samplers: ComfyUI's own sampler nodes, called with a MODEL or GUIDER whose sampling runs in the workers."""

from __future__ import annotations

from typing import Any

import comfy.samplers
from comfy_api.latest import io
from comfy_extras.nodes_custom_sampler import SamplerCustom, SamplerCustomAdvanced
from nodes import KSampler, KSamplerAdvanced  # type: ignore[attr-defined]  # ComfyUI's module, not our package

from ..parallel_runtime.specs import ParallelRequest
from .config import CATEGORY, CPConfig, requested
from .remote import guider_on_workers, model_on_workers

SEARCH = ["ksampler", "several gpus", "multi gpu", "multiple gpus", "distributed", "parallel", "context parallel"]
CP_CONFIG_INPUT = CPConfig.Input(
    "cp_config", optional=True, tooltip="How to divide the work. Unconnected: every GPU, degrees chosen for the model."
)
MODEL_INPUT = io.Model.Input("model", tooltip="The model used for denoising the input latent.")
CFG_INPUT = io.Float.Input(
    "cfg",
    default=8.0,
    min=0.0,
    max=100.0,
    step=0.1,
    round=0.01,
    tooltip="The Classifier-Free Guidance scale: how closely the result follows the prompt.",
)
PROMPT_INPUTS = [
    io.Conditioning.Input("positive", tooltip="What you want to include in the image."),
    io.Conditioning.Input("negative", tooltip="What you want to exclude from the image."),
]
ALGORITHM_INPUTS = [
    io.Sampler.Input("sampler", tooltip="The sampling algorithm."),
    io.Sigmas.Input("sigmas", tooltip="The noise level of each step."),
]
LATENT_INPUT = io.Latent.Input("latent_image", tooltip="The latent image to denoise.")
CUSTOM_OUTPUTS = [
    io.Latent.Output(display_name="output", tooltip="The latent after the last step."),
    io.Latent.Output(display_name="denoised_output", tooltip="What the model made of the last step, without noise."),
]


def seed_input(name: str) -> io.Input:
    return io.Int.Input(
        name,
        default=0,
        min=0,
        max=0xFFFFFFFFFFFFFFFF,
        control_after_generate=True,
        tooltip="The random seed used for creating the noise.",
    )


def ksampler_inputs(seed_name: str) -> list[io.Input]:
    """What KSampler and KSampler (Advanced) have in common, in their order."""
    return [
        seed_input(seed_name),
        io.Int.Input(
            "steps", default=20, min=1, max=10000, tooltip="The number of steps used in the denoising process."
        ),
        CFG_INPUT,
        io.Combo.Input("sampler_name", options=comfy.samplers.KSampler.SAMPLERS, tooltip="The sampling algorithm."),
        io.Combo.Input(
            "scheduler",
            options=comfy.samplers.KSampler.SCHEDULERS,
            tooltip="How noise is gradually removed to form the image.",
        ),
        *PROMPT_INPUTS,
        LATENT_INPUT,
    ]


class CPSampler(io.ComfyNode):
    """KSampler's sockets and widgets in KSampler's order, and one optional socket."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPSampler",
            display_name="CP Sampler",
            category=CATEGORY,
            description="KSampler on several GPUs: one image or video, divided over workers, with the same result.",
            search_aliases=SEARCH,
            inputs=[
                MODEL_INPUT,
                *ksampler_inputs("seed"),
                io.Float.Input(
                    "denoise",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    tooltip="The amount of denoising; lower values keep the structure of the initial image.",
                ),
                CP_CONFIG_INPUT,
            ],
            outputs=[io.Latent.Output(tooltip="The denoised latent.")],
        )

    @classmethod
    def execute(cls, model: Any, cp_config: ParallelRequest | None = None, **widgets: Any) -> io.NodeOutput:
        remote = model_on_workers(model, requested(cp_config))
        return io.NodeOutput(*KSampler().sample(remote, **widgets))


class CPSamplerAdvanced(io.ComfyNode):
    """KSampler (Advanced)'s sockets and widgets in its order, and one optional socket."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPSamplerAdvanced",
            display_name="CP Sampler (Advanced)",
            category=CATEGORY,
            description="KSampler (Advanced) on several GPUs, with the same result.",
            search_aliases=SEARCH,
            inputs=[
                MODEL_INPUT,
                io.Combo.Input(
                    "add_noise", options=["enable", "disable"], advanced=True,
                    tooltip="disable where the latent has its noise already: from a sampler of earlier steps.",
                ),
                *ksampler_inputs("noise_seed"),
                io.Int.Input(
                    "start_at_step", default=0, min=0, max=10000, advanced=True, tooltip="The first step to sample."
                ),
                io.Int.Input(
                    "end_at_step", default=10000, min=0, max=10000, advanced=True,
                    tooltip="The step before which sampling ends.",
                ),
                io.Combo.Input(
                    "return_with_leftover_noise", options=["disable", "enable"], advanced=True,
                    tooltip="enable where another sampler goes on from here.",
                ),
                CP_CONFIG_INPUT,
            ],
            outputs=[io.Latent.Output(tooltip="The denoised latent.")],
        )  # fmt: skip

    @classmethod
    def execute(cls, model: Any, cp_config: ParallelRequest | None = None, **widgets: Any) -> io.NodeOutput:
        remote = model_on_workers(model, requested(cp_config))
        return io.NodeOutput(*KSamplerAdvanced().sample(remote, **widgets))


class CPSamplerCustom(io.ComfyNode):
    """SamplerCustomAdvanced's sockets in its order, and one optional socket."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPSamplerCustom",
            display_name="CP Sampler Custom (Advanced)",
            category=CATEGORY,
            description="SamplerCustomAdvanced on several GPUs, with the same result.",
            search_aliases=SEARCH,
            inputs=[
                io.Noise.Input("noise", tooltip="Where the noise comes from: Random Noise, or none."),
                io.Guider.Input("guider", tooltip="Model and prompts, and how the prompts are weighed."),
                *ALGORITHM_INPUTS,
                LATENT_INPUT,
                CP_CONFIG_INPUT,
            ],
            outputs=CUSTOM_OUTPUTS,
        )

    @classmethod
    def execute(cls, guider: Any, cp_config: ParallelRequest | None = None, **sockets: Any) -> io.NodeOutput:
        remote = guider_on_workers(guider, requested(cp_config))
        return SamplerCustomAdvanced.execute(guider=remote, **sockets)


class CPSamplerCustomBasic(io.ComfyNode):
    """SamplerCustom's sockets and widgets in its order, and one optional socket."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPSamplerCustomBasic",
            display_name="CP Sampler Custom",
            category=CATEGORY,
            description="SamplerCustom on several GPUs, with the same result.",
            search_aliases=SEARCH,
            inputs=[
                MODEL_INPUT,
                io.Boolean.Input(
                    "add_noise", default=True, advanced=True,
                    tooltip="Off where the latent has its noise already: from a sampler of earlier steps.",
                ),
                seed_input("noise_seed"),
                CFG_INPUT,
                *PROMPT_INPUTS,
                *ALGORITHM_INPUTS,
                LATENT_INPUT,
                CP_CONFIG_INPUT,
            ],
            outputs=CUSTOM_OUTPUTS,
        )  # fmt: skip

    @classmethod
    def execute(cls, model: Any, cp_config: ParallelRequest | None = None, **widgets: Any) -> io.NodeOutput:
        return SamplerCustom.execute(model_on_workers(model, requested(cp_config)), **widgets)
