"""The CP samplers: ComfyUI's own sampler nodes, called with a MODEL or GUIDER whose sampling runs in the workers.

Each has exactly the native node's sockets and widgets in its order, read off that node, and one optional socket.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
TOOLTIPS = {  # where ComfyUI has none: neither the native node nor KSampler, of this name
    "add_noise": "Off, or disable, where the latent has its noise already: from a sampler of earlier steps.",
    "noise_seed": "The random seed used for creating the noise.",
    "start_at_step": "The first step to sample.",
    "end_at_step": "The step before which sampling ends.",
    "return_with_leftover_noise": "enable where another sampler goes on from here.",
    "noise": "Where the noise comes from: Random Noise, or none.",
    "guider": "Model and prompts, and how the prompts are weighed.",
    "sampler": "The sampling algorithm.",
    "sigmas": "The noise level of each step.",
    "LATENT": "The denoised latent.",
    "output": "The latent after the last step.",
    "denoised_output": "What the model made of the last step, without noise.",
}


class CPSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        says = "KSampler on several GPUs: one image or video, divided over workers, with the same result."
        return schema_of(KSampler, node_id="CPSampler", display_name="CP Sampler", description=says)

    @classmethod
    def execute(cls, model: Any, cp_config: ParallelRequest | None = None, **widgets: Any) -> io.NodeOutput:
        remote = model_on_workers(model, requested(cp_config))
        return io.NodeOutput(*KSampler().sample(remote, **widgets))


class CPSamplerAdvanced(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        says = "KSampler (Advanced) on several GPUs, with the same result."
        title = "CP Sampler (Advanced)"
        return schema_of(KSamplerAdvanced, node_id="CPSamplerAdvanced", display_name=title, description=says)

    @classmethod
    def execute(cls, model: Any, cp_config: ParallelRequest | None = None, **widgets: Any) -> io.NodeOutput:
        remote = model_on_workers(model, requested(cp_config))
        return io.NodeOutput(*KSamplerAdvanced().sample(remote, **widgets))


class CPSamplerCustom(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        says = "SamplerCustomAdvanced on several GPUs, with the same result."
        title = "CP Sampler Custom (Advanced)"
        return schema_of(SamplerCustomAdvanced, node_id="CPSamplerCustom", display_name=title, description=says)

    @classmethod
    def execute(cls, guider: Any, cp_config: ParallelRequest | None = None, **sockets: Any) -> io.NodeOutput:
        remote = guider_on_workers(guider, requested(cp_config))
        return SamplerCustomAdvanced.execute(guider=remote, **sockets)


class CPSamplerCustomBasic(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        says = "SamplerCustom on several GPUs, with the same result."
        title = "CP Sampler Custom"
        return schema_of(SamplerCustom, node_id="CPSamplerCustomBasic", display_name=title, description=says)

    @classmethod
    def execute(cls, model: Any, cp_config: ParallelRequest | None = None, **widgets: Any) -> io.NodeOutput:
        return SamplerCustom.execute(model_on_workers(model, requested(cp_config)), **widgets)


def schema_of(native: Any, **named: str) -> io.Schema:
    """That of a node of ComfyUI's, also of one from before schemas, and a `cp_config`; `named` as in a schema."""
    tooltips = TOOLTIPS | {name: options.get("tooltip") for name, _, options in _inputs_of(KSampler, "required")}
    names = getattr(native, "RETURN_NAMES", native.RETURN_TYPES)
    outputs = zip(native.RETURN_TYPES, names, strict=True)
    return io.Schema(
        **named,
        category=CATEGORY,
        search_aliases=SEARCH,
        inputs=[
            *(_input(*given, tooltips) for given in _inputs_of(native, "required")),
            *(_input(*given, tooltips, optional=True) for given in _inputs_of(native, "optional")),
            CP_CONFIG_INPUT,
        ],
        outputs=[io.Custom(kind).Output(display_name=name, tooltip=tooltips.get(name)) for kind, name in outputs],
    )


def _inputs_of(native: Any, how: str) -> Iterator[tuple[str, str | list[str], dict[str, Any]]]:
    """Name, type and options of each input in its order; a list of what can be chosen is a type, too."""
    for name, (kind, *options) in native.INPUT_TYPES().get(how, {}).items():
        yield name, kind, dict(*options)


def _input(
    name: str, kind: str | list[str], options: dict[str, Any], tooltips: dict[str, str | None], optional: bool = False
) -> io.Input:
    said = {"tooltip": tooltips.get(name), **options}
    if isinstance(kind, list):
        return io.Combo.Input(name, options=kind, optional=optional, extra_dict=said)
    return io.Custom(kind).Input(name, optional=optional, extra_dict=said)
