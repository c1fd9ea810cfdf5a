"""CP Parallel Config: how the work is cut. Describes only; nothing starts here."""

from __future__ import annotations

from typing import get_args

from comfy_api.latest import io

from ..parallel_runtime.errors import Refused
from ..parallel_runtime.specs import (
    AfterSampling,
    AttentionBackend,
    CompileChoice,
    DtypeChoice,
    GraphsChoice,
    ParallelRequest,
    RotateMethod,
    WeightsChoice,
)
from .settings import refresh

CATEGORY = "model/sampling/context parallel"
CPConfig = io.Custom("CP_CONFIG")


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
            inputs=[
                io.Int.Input(
                    "ring_degree", default=0, min=0, max=64,
                    tooltip="Workers in the ring: each holds a part of the tokens, keys and values go round. 0 = auto.",
                ),
                io.Int.Input(
                    "ulysses_degree", default=0, min=0, max=64,
                    tooltip="Workers that swap tokens for attention heads. Meant for NVLink; at most one worker per "
                    "head. 0 = auto. Workers in all: the product of the degrees.",
                ),
                io.Combo.Input(
                    "rotate_method", options=list(get_args(RotateMethod)), default="alltoall", advanced=True,
                    tooltip="How a ring moves keys and values: alltoall passes blocks on while computing, allgather "
                    "collects them all first (more memory). auto = allgather where there is room and the link is fast, "
                    "else alltoall.",
                ),
                io.Boolean.Input(
                    "convert_to_fp32", default=True, advanced=True,
                    tooltip="Merge the ring's partial results in float32.",
                ),
                io.Combo.Input(
                    "attention_backend", options=list(get_args(AttentionBackend)), default="auto", advanced=True,
                    tooltip="The attention kernel of each worker, by diffusers' name. auto = where workers share a "
                    "sequence the fastest that is there, by a race; one worker has ComfyUI's own attention.",
                ),
                io.Combo.Input(
                    "dtype", options=list(get_args(DtypeChoice)), default="auto", advanced=True,
                    tooltip="What the workers compute in. auto = what ComfyUI would use for this model.",
                ),
                io.String.Input(
                    "devices", default="", advanced=True,
                    tooltip="GPUs to use, such as 0,1. Empty = all. cpu,cpu starts two workers on the CPU, 0,0 two "
                    "that share GPU 0.",
                ),
                io.Int.Input(
                    "cfg_degree", default=0, min=0, max=2, advanced=True, optional=True,
                    tooltip="2: positive and negative prompt run side by side on two halves of the workers; at cfg 1 "
                    "both halves work on the one prompt. 0 = auto.",
                ),
                io.Int.Input(
                    "data_degree", default=1, min=1, max=64, advanced=True, optional=True,
                    tooltip="Groups of workers that share the images of a batch.",
                ),
                io.Float.Input(
                    "step_cache", default=0.0, min=0.0, max=1.0, step=0.01, round=0.001, advanced=True, optional=True,
                    tooltip="Where the first block of the model changes by less than this share from one evaluation "
                    "to the next, the other blocks are skipped. Faster, not exact; 0.05 to 0.1 is common. 0 = off. "
                    "Refused where no plan cuts the network, or the loop stays in ComfyUI.",
                ),
                io.Combo.Input(
                    "after_sampling", options=list(get_args(AfterSampling)), default="keep", advanced=True,
                    optional=True,
                    tooltip="What the workers do with the model after a run: keep it, offload it to main memory, or "
                    "unload it.",
                ),
                io.Int.Input(
                    "nnodes", default=1, min=1, max=64, advanced=True, optional=True,
                    tooltip="Machines, this one included. Each gives as many devices as this one; the others run "
                    "the join command and share a token with this one: see the README.",
                ),
                io.String.Input(
                    "rdzv_endpoint", default="", advanced=True, optional=True,
                    tooltip="With several machines: the address of this one and a free port, such as 10.0.0.1:29500. "
                    "Only there do the others find it.",
                ),
                io.Combo.Input(
                    "weights", options=list(get_args(WeightsChoice)), default="auto", advanced=True, optional=True,
                    tooltip="Where the model's weights are. replicate: whole on every GPU. shard: each GPU keeps a "
                    "part, and a block is gathered just before it runs. offload: once in main memory, and a block is "
                    "copied to the GPU just before it runs. Both hold as little on the GPU as they can. auto: "
                    "replicate where it fits, else the faster of the two, with as many blocks on the GPU as fit.",
                ),
                io.Combo.Input(
                    "compile", options=list(get_args(CompileChoice)), default="off", advanced=True, optional=True,
                    tooltip="on: torch.compile for each block of the model in the workers. The first step takes "
                    "minutes; a new size may compile again. Torch Compile Model on the MODEL does the same.",
                ),
                io.Combo.Input(
                    "cuda_graphs", options=list(get_args(GraphsChoice)), default="auto", advanced=True, optional=True,
                    tooltip="Record an evaluation of the model once as a CUDA graph, and replay it: one launch a step, "
                    "the same bits. auto: where the CPU would launch it slower than the GPU computes. on: always. "
                    "Recorded sizes hold GPU memory, four at most, until the model is unloaded.",
                ),
            ],
            outputs=[CPConfig.Output(display_name="cp_config", tooltip="For the CP nodes.")],
        )  # fmt: skip

    @classmethod
    def execute(
        cls,
        ring_degree: int,
        ulysses_degree: int,
        rotate_method: RotateMethod,
        convert_to_fp32: bool,
        attention_backend: AttentionBackend,
        dtype: DtypeChoice,
        devices: str,
        cfg_degree: int = 0,
        data_degree: int = 1,
        step_cache: float = 0.0,
        after_sampling: AfterSampling = "keep",
        nnodes: int = 1,
        rdzv_endpoint: str = "",
        weights: WeightsChoice = "auto",
        compile: CompileChoice = "off",
        cuda_graphs: GraphsChoice = "auto",
    ) -> io.NodeOutput:
        return io.NodeOutput(
            ParallelRequest(
                ring_degree=ring_degree,
                ulysses_degree=ulysses_degree,
                rotate_method=rotate_method,
                convert_to_fp32=convert_to_fp32,
                attention_backend=attention_backend,
                dtype=dtype,
                devices=devices,
                cfg_degree=cfg_degree,
                data_degree=data_degree,
                step_cache=step_cache,
                after_sampling=after_sampling,
                nnodes=nnodes,
                rdzv_endpoint=rdzv_endpoint,
                weights=weights,
                compile=compile,
                cuda_graphs=cuda_graphs,
            )
        )
