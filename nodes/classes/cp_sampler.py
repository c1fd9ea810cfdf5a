"""The CP samplers: ComfyUI's own sampler nodes, called with a MODEL or GUIDER whose sampling runs in the workers.

Each has exactly the native node's sockets and widgets in its order, read off that node, and one optional socket: for
CP Parallel Config, whose widgets are the table of parallel_runtime/request.py.

A new one also wants a help page in web/docs/, words in locales/*/nodeDefs.json, and a row in README.md and in "Names"
of docs/scripts.md. A native node that older versions of ComfyUI lack must not be imported at the top."""

from collections.abc import Iterator
from typing import Any

from comfy_api.latest import io
from comfy_extras.nodes_custom_sampler import SamplerCustom, SamplerCustomAdvanced
from nodes import KSampler, KSamplerAdvanced  # type: ignore[attr-defined]  # ComfyUI's module, not our package

from ...parallel_runtime.request import ParallelRequest, Widget, widgets
from ..describe.host import announce_refusals, request_from
from ..remote.sampling_run import guider_on_workers, model_described_late, model_on_workers

CATEGORY = "model/sampling/context parallel"
CPConfig = io.Custom("CP_CONFIG")
INPUTS = {bool: io.Boolean, int: io.Int, float: io.Float, str: io.String}
SEARCH = ["ksampler", "several gpus", "multi gpu", "multiple gpus", "distributed", "parallel", "context parallel"]
CP_CONFIG_INPUT = CPConfig.Input(
    "cp_config",
    optional=True,
    tooltip="How to divide the work. Unconnected: the default devices, degrees chosen for the model.",
)
WORKERS_INPUT = CPConfig.Input(
    "cp_config",
    optional=True,
    tooltip="Which workers. Unconnected: the ones that a CP sampler has started, else the default devices.",
)
TOOLTIPS = {  # for inputs and outputs to which neither the native node nor KSampler gives a tooltip
    "add_noise": "Off, or disable, if the latent has its noise already: from a sampler of earlier steps.",
    "noise_seed": "The random seed used for creating the noise.",
    "start_at_step": "The first step to sample.",
    "end_at_step": "The step before which sampling ends.",
    "return_with_leftover_noise": "enable if another sampler goes on from here.",
    "noise": "Where the noise comes from: Random Noise, or none.",
    "guider": "Model and prompts, and how the prompts are weighed.",
    "sampler": "The sampling algorithm.",
    "sigmas": "The noise level of each step.",
    "LATENT": "The denoised latent.",
    "output": "The latent after the last step.",
    "denoised_output": "What the model made of the last step, without noise.",
}


class CPParallelConfig(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPParallelConfig",
            display_name="CP Parallel Config",
            category=CATEGORY,
            description="How CP Sampler divides one image or video over GPUs. Optional: without it the default devices "
            "are used.",
            search_aliases=["multi gpu", "ring attention", "ulysses", "context parallel", "sequence parallel"],
            inputs=[_widget(widget) for widget in widgets()],
            outputs=[CPConfig.Output(display_name="cp_config", tooltip="For the CP nodes.")],
        )

    @classmethod
    @announce_refusals()
    def execute(cls, **values: Any) -> io.NodeOutput:
        return io.NodeOutput(ParallelRequest.of(values))


def _widget(widget: Widget) -> io.Input:
    display = {"optional": not widget.required, "advanced": widget.advanced or None}
    options = {"default": widget.default, "tooltip": widget.tooltip, **display, **widget.limits}
    if widget.options:
        return io.Combo.Input(widget.name, options=list(widget.options), **options)
    return INPUTS[widget.kind].Input(widget.name, **options)


class CPSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        description = "KSampler on several GPUs: one image or video, divided over workers, with the same result."
        return schema_of(KSampler, node_id="CPSampler", display_name="CP Sampler", description=description)

    @classmethod
    @announce_refusals()
    def execute(cls, model: Any, cp_config: ParallelRequest | None = None, **widgets: Any) -> io.NodeOutput:
        remote = model_on_workers(model, request_from(cp_config))
        return io.NodeOutput(*KSampler().sample(remote, **widgets))


class CPModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPModel",
            display_name="CP Model",
            category=CATEGORY,
            description="A MODEL that any sampler node, of any pack, samples on several GPUs, with the same result.",
            search_aliases=SEARCH,
            inputs=[io.Model.Input("model", tooltip="From Load Diffusion Model, Load Checkpoint or a LoRA loader."),
                    CP_CONFIG_INPUT],
            outputs=[io.Model.Output(tooltip="For every node that samples. LoRAs and model patches may come before or "
                                     "after.")],
        )  # fmt: skip

    @classmethod
    @announce_refusals()
    def execute(cls, model: Any, cp_config: ParallelRequest | None = None) -> io.NodeOutput:
        return io.NodeOutput(model_described_late(model, request_from(cp_config)))


class CPSamplerAdvanced(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        description = "KSampler (Advanced) on several GPUs, with the same result."
        title = "CP Sampler (Advanced)"
        return schema_of(KSamplerAdvanced, node_id="CPSamplerAdvanced", display_name=title, description=description)

    @classmethod
    @announce_refusals()
    def execute(cls, model: Any, cp_config: ParallelRequest | None = None, **widgets: Any) -> io.NodeOutput:
        remote = model_on_workers(model, request_from(cp_config))
        return io.NodeOutput(*KSamplerAdvanced().sample(remote, **widgets))


class CPSamplerCustom(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        description = "SamplerCustomAdvanced on several GPUs, with the same result."
        title = "CP Sampler Custom (Advanced)"
        return schema_of(SamplerCustomAdvanced, node_id="CPSamplerCustom", display_name=title, description=description)

    @classmethod
    @announce_refusals()
    def execute(cls, guider: Any, cp_config: ParallelRequest | None = None, **sockets: Any) -> io.NodeOutput:
        remote = guider_on_workers(guider, request_from(cp_config))
        return SamplerCustomAdvanced.execute(guider=remote, **sockets)


class CPSamplerCustomBasic(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        description = "SamplerCustom on several GPUs, with the same result."
        title = "CP Sampler Custom"
        return schema_of(SamplerCustom, node_id="CPSamplerCustomBasic", display_name=title, description=description)

    @classmethod
    @announce_refusals()
    def execute(cls, model: Any, cp_config: ParallelRequest | None = None, **widgets: Any) -> io.NodeOutput:
        return SamplerCustom.execute(model_on_workers(model, request_from(cp_config)), **widgets)


def schema_of(native: Any, **named: str) -> io.Schema:
    """Returns the schema of ComfyUI's node `native` with a `cp_config`. `named`: io.Schema's id and names."""
    tooltips = TOOLTIPS | {name: options.get("tooltip") for name, _, options in _inputs_of(KSampler, "required")}
    names = getattr(native, "RETURN_NAMES", native.RETURN_TYPES)
    outputs = zip(native.RETURN_TYPES, names, strict=True)
    return io.Schema(
        **named,
        category=CATEGORY,
        search_aliases=SEARCH,
        inputs=[
            *(_input(*declared, tooltips) for declared in _inputs_of(native, "required")),
            *(_input(*declared, tooltips, optional=True) for declared in _inputs_of(native, "optional")),
            CP_CONFIG_INPUT,
        ],
        outputs=[io.Custom(kind).Output(display_name=name, tooltip=tooltips.get(name)) for kind, name in outputs],
    )


def _inputs_of(native: Any, group: str) -> Iterator[tuple[str, str | list[str], dict[str, Any]]]:
    """Yields name, type and options of each input in the group "required" or "optional". A combo's type is a list."""
    for name, (kind, *options) in native.INPUT_TYPES().get(group, {}).items():
        yield name, kind, dict(*options)


def _input(
    name: str, kind: str | list[str], options: dict[str, Any], tooltips: dict[str, str | None], optional: bool = False
) -> io.Input:
    extra = {"tooltip": tooltips.get(name), **options}
    if isinstance(kind, list):
        return io.Combo.Input(name, options=kind, optional=optional, extra_dict=extra)
    return io.Custom(kind).Input(name, optional=optional, extra_dict=extra)
