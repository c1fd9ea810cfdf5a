"""CP Parallel Config: how the work is cut. Describes only; nothing starts here."""

from __future__ import annotations

from typing import Any, get_args

from comfy_api.latest import io

from ..parallel_runtime.errors import Refused
from ..parallel_runtime.specs import ParallelRequest, widgets
from .settings import refresh

CATEGORY = "model/sampling/context parallel"
CPConfig = io.Custom("CP_CONFIG")
INPUTS = {bool: io.Boolean, int: io.Int, float: io.Float, str: io.String}
NEEDED = ("ring_degree", "ulysses_degree")
IN_SIGHT = (*NEEDED, "devices")
LIMITS: dict[str, dict[str, float]] = {  # of the numbers
    "ring_degree": {"min": 0, "max": 64},
    "ulysses_degree": {"min": 0, "max": 64},
    "cfg_degree": {"min": 0, "max": 2},
    "data_degree": {"min": 1, "max": 64},
    "step_cache": {"min": 0.0, "max": 1.0, "step": 0.01, "round": 0.001},
    "nnodes": {"min": 1, "max": 64},
    "pipeline_degree": {"min": 0, "max": 64},
    "patches": {"min": 1, "max": 64},
    "warmup_steps": {"min": 1, "max": 1000},
}
TOOLTIPS = {  # of the widgets, in their order, by which workflows hold them
    "ring_degree": "Workers in the ring: each holds a part of the tokens, keys and values go round. 0 = auto.",
    "ulysses_degree":
        "Workers that swap tokens for attention heads. Meant for NVLink; at most one worker per head. 0 = auto. "
        "Workers in all: the product of the degrees.",
    "rotate_method":
        "How a ring moves keys and values: alltoall passes blocks on while computing, allgather collects them all "
        "first (more memory). auto = allgather where there is room and the link is fast, else alltoall.",
    "convert_to_fp32": "Merge the ring's partial results in float32.",
    "attention_backend":
        "The attention kernel of each worker, by diffusers' name. auto = where workers share a sequence the fastest "
        "that is there, by a race; one worker has ComfyUI's own attention.",
    "dtype": "What the workers compute in. auto = what ComfyUI would use for this model.",
    "devices":
        "GPUs to use, such as 0,1. Empty = all. cpu,cpu starts two workers on the CPU, 0,0 two that share GPU 0.",
    "cfg_degree":
        "2: positive and negative prompt run side by side on two halves of the workers; at cfg 1 both halves work on "
        "the one prompt. 0 = auto.",
    "data_degree": "Groups of workers that share the images of a batch.",
    "step_cache":
        "Where the first block of the model changes by less than this share from one evaluation to the next, the "
        "other blocks are skipped. Faster, not exact; 0.05 to 0.1 is common. 0 = off. Refused where no plan cuts the "
        "network, or the loop stays in ComfyUI.",
    "after_sampling":
        "What the workers do with the model after a run: keep it, offload it to main memory, or unload it.",
    "nnodes":
        "Machines, this one included. Each gives as many devices as this one; the others run the join command and "
        "share a token with this one: see docs/several-machines.md.",
    "rdzv_endpoint":
        "With several machines: the address of this one and a free port, such as 10.0.0.1:29500. Only there do the "
        "others find it.",
    "weights":
        "Where the model's weights are. replicate: whole on every GPU. shard: each GPU keeps a part, and a block is "
        "gathered just before it runs. offload: once in main memory, and a block is copied to the GPU just before it "
        "runs. Both hold as little on the GPU as they can. auto: replicate where it fits, else the faster of the two, "
        "with as many blocks on the GPU as fit.",
    "compile":
        "on: torch.compile for each block of the model in the workers. The first step takes minutes; a new size may "
        "compile again. Torch Compile Model on the MODEL does the same.",
    "cuda_graphs":
        "Record an evaluation of the model once as a CUDA graph, and replay it: one launch a step, the same bits. "
        "auto: where the CPU would launch it slower than the GPU computes. on: always. Recorded sizes hold GPU "
        "memory, four at most, until the model is unloaded.",
    "shares":
        "How much of the work each worker gets, for cards that are not alike. Numbers such as 3,2: in the order of "
        "devices, one for each worker, or for each device, of which a run on fewer takes the first. equal: all alike. "
        "auto: by what the workers measure.",
    "pipeline_degree":
        "Stages of a pipeline: each has its own part of the model's blocks, and passes the tokens on. For models that "
        "do not fit, and for slow links; exact. Prompts and images follow each other through the stages. 1 = none, "
        "0 = where nothing else fits.",
    "patches":
        "Parts of one evaluation that follow each other through the stages of a pipeline (PipeFusion), with keys and "
        "values that are one step old. Faster, approximate: not the picture of one GPU. 8 steps or more; not every "
        "network. 1 = exact.",
    "warmup_steps":
        "With patches above 1: so many first steps are exact. More are nearer to one GPU's picture and slower; 2 to 4 "
        "are advised below 20 steps.",
}  # fmt: skip


def requested(cp_config: object) -> ParallelRequest:
    """What is connected to a `cp_config` socket, or the default. Raises Refused for anything else."""
    if cp_config is None:
        return refresh().request
    if not isinstance(cp_config, ParallelRequest):
        raise Refused(f"cp_config is a {type(cp_config).__name__}; connect a CP Parallel Config or a CP Plan")
    return cp_config


class CPParallelConfig(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPParallelConfig",
            display_name="CP Parallel Config",
            category=CATEGORY,
            description="How CP Sampler divides one image or video over GPUs. Optional: without it every GPU is used.",
            search_aliases=["multi gpu", "ring attention", "ulysses", "context parallel", "sequence parallel"],
            inputs=[_widget(name, tooltip) for name, tooltip in TOOLTIPS.items()],
            outputs=[CPConfig.Output(display_name="cp_config", tooltip="For the CP nodes.")],
        )

    @classmethod
    def execute(cls, **values: Any) -> io.NodeOutput:
        return io.NodeOutput(ParallelRequest.of(values))


def _widget(name: str, tooltip: str) -> io.Input:
    """The input for a value of ParallelRequest, which knows what it can be and what it usually is."""
    kind, usual = widgets()[name], getattr(ParallelRequest(), name)
    shown = {"optional": name not in NEEDED, "advanced": name not in IN_SIGHT or None}
    more = {"default": usual, "tooltip": tooltip, **shown, **LIMITS.get(name, {})}
    if options := get_args(kind):
        return io.Combo.Input(name, options=list(options), **more)
    return INPUTS[kind].Input(name, **more)
