"""Prints the bytes that each new prompt loads onto two GPUs of 24 GiB, reckoned by the planner: with ComfyUI's own text
encoder on GPU 0, where it pushes weights of the network out, and with CP CLIP. Networks and encoders are ComfyUI's own
classes in their published sizes, without weights (on the meta device); nothing is measured. The first load of each file
is left out.

    python -m tests.bench.prompts
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from parallel_runtime.architectures import architecture_of
from parallel_runtime.planning.resolve import EncoderPlacement, EncoderSize, place_encoder
from parallel_runtime.planning.run_plan import RunPlan

from ..planning.your_gpus import GIB, Job, Machine, plan
from ..zoo import tiny
from ..zoo.networks import FLUX, FLUX2, QWEN
from . import harness

TWO = Machine(name="CP_MEMORY_GIB=24 on two workers", gpus=2, gib=24, link=1e10, flops=1.4e14)
BUDGET = int(TWO.gib * GIB)
WORKSPACE = int(1.2 * GIB)  # what ComfyUI keeps free for an encoder at least
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
WIDE = {"hidden_size": 3072, "num_heads": 24, "axes_dim": [16, 56, 56], "depth": 19, "depth_single_blocks": 38}
WIDER = {"hidden_size": 6144, "num_heads": 48, "axes_dim": [32, 32, 32, 32], "depth": 8, "depth_single_blocks": 48}
QWEN_WIDE = {"num_layers": 60, "attention_head_dim": 128, "num_attention_heads": 24, "joint_attention_dim": 3584}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A network's class and config, its text encoder's class or what makes that, and a run of both."""

    name: str
    network: str
    config: dict[str, Any]
    encoder_name: str
    encoder: str
    options: dict[str, Any]
    tokens: int
    prompts: int


PAIRS = (
    Pair(
        name="FLUX.1 dev", network="ldm.flux.model:Flux", tokens=4608, prompts=1,
        config=FLUX | WIDE | {"vec_in_dim": 768, "context_in_dim": 4096},
        encoder_name="CLIP-L and T5-XXL", encoder="text_encoders.flux:FluxClipModel", options={},
    ),
    Pair(
        name="Qwen-Image", network="ldm.qwen_image.model:QwenImageTransformer2DModel", tokens=7000, prompts=2,
        config=QWEN | QWEN_WIDE | {"axes_dims_rope": [16, 56, 56]},
        encoder_name="Qwen2.5-VL 7B", encoder="text_encoders.qwen_image:QwenImageTEModel", options={},
    ),
    Pair(
        name="FLUX.2 dev", network="ldm.flux.model:Flux", tokens=4608, prompts=1,
        config=FLUX2 | WIDER | {"context_in_dim": 15360},
        encoder_name="Mistral 24B", encoder="text_encoders.flux:Flux2TEModel", options={"num_layers": 30},
    ),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What a prompt loads, in bytes: of the encoder, and of the network, which has made room for it."""

    encoder: int
    network: int

    def __str__(self) -> str:
        return f"{self.encoder / GIB:.1f} + {self.network / GIB:.1f}"


def pushed_out(network: RunPlan, needed: int, ranks: tuple[int, ...]) -> int:
    """Returns the network's bytes that make room for `needed` ones on each of these workers. Weights that are shared
    out or in main memory go together, on all of them."""
    assert network.estimate is not None
    weights = network.estimate.weight_bytes_by_rank
    missing = {rank: min(weights[rank], max(0, weights[rank] + needed - BUDGET)) for rank in ranks}
    if network.weights.mode != "replicate" and any(missing.values()):
        return sum(weights)
    return sum(missing.values())


def natively(network: RunPlan, size: EncoderSize) -> Prompt:
    """ComfyUI's encoder on GPU 0 makes room there, and the next run takes that again."""
    out = pushed_out(network, size.weights + size.workspace, (0,))
    return Prompt(encoder=size.weights if out else 0, network=out)


def with_cp_clip(network: RunPlan, size: EncoderSize) -> tuple[Prompt, EncoderPlacement]:
    assert network.estimate is not None
    beside = [BUDGET - weights for weights in network.estimate.weight_bytes_by_rank]
    placed = place_encoder(size, beside, [BUDGET] * TWO.gpus)
    fetched = size.weights - placed.weight_bytes[0] if placed.weights.mode == "offload" else 0
    if placed.beside:
        return Prompt(encoder=fetched, network=0), placed
    out = pushed_out(network, max(placed.weight_bytes) + placed.buffer_bytes + size.workspace, placed.ranks)
    return Prompt(encoder=size.weights, network=out), placed


def where(placed: EncoderPlacement) -> str:
    if placed.stages:
        return f"in stages of {' and '.join(map(str, placed.stages))} units"
    return "fetched" if placed.weights.mode == "offload" else f"whole on worker {placed.ranks[0]}"


def rows() -> Iterator[harness.Row]:
    """In ComfyUI's python: by row the cells, and the bytes that ComfyUI alone and CP CLIP load."""
    from ..comfyui.pack import node_module

    tiny.computed_in(BF16)
    stats_of, size_of = (
        node_module("describe.model").network_stats_of,
        node_module("remote.remote_encoder").encoder_size,
    )
    patcher_of, size_in_bytes = _comfyui()
    for pair in PAIRS:
        for network_dtype, encoder_dtype in ((BF16, BF16), (BF16, FP8), (FP8, FP8)):
            network = in_dtype(tiny.kind_of(pair.network)(**pair.config, **tiny.settings("meta")), network_dtype)
            encoder = in_dtype(
                tiny.kind_of(pair.encoder)(device="meta", dtype=BF16, model_options=pair.options), encoder_dtype
            )
            stats = stats_of(network, architecture_of(network), size_in_bytes(network), BF16.itemsize)
            size = size_of(patcher_of(encoder), staged=True, workspace=WORKSPACE)
            planned = plan(TWO, Job(name=pair.name, network=stats, tokens=pair.tokens, prompts=pair.prompts), TWO.gpus)
            before, (after, placed) = natively(planned, size), with_cp_clip(planned, size)
            cells = [
                f"{pair.name} with {pair.encoder_name}",
                f"{name_of(network_dtype)}, {stats.weight_bytes / GIB:.1f}, {planned.weights.mode}",
                f"{name_of(encoder_dtype)}, {size.weights / GIB:.1f}",
                str(before),
                str(after),
                where(placed) + ("" if placed.beside else ", the network makes room"),
            ]
            yield {"cells": cells, "before": before.encoder + before.network, "after": after.encoder + after.network}


def _comfyui() -> tuple[Any, Any]:
    from comfy.model_management import module_size
    from comfy.model_patcher import ModelPatcher

    cpu = torch.device("cpu")
    return lambda model: ModelPatcher(model, load_device=cpu, offload_device=cpu), module_size


def in_dtype(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Returns the model with the matrices of its linear layers in this dtype, as files in fp8 have them."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight.to(dtype), requires_grad=False)
    return model


def name_of(dtype: torch.dtype) -> str:
    return "fp8" if dtype == FP8 else "bf16"


def measured() -> list[harness.Row]:
    return harness.launch("prompts", in_comfyui=True)


def table(found: list[harness.Row]) -> str:
    head = (
        "| GiB a prompt | network | encoder | ComfyUI alone: encoder + network | CP CLIP: encoder + network | where |"
    )
    return "\n".join([head, "|---|---|---|---|---|---|", *(f"| {' | '.join(row['cells'])} |" for row in found)])


if __name__ == "__main__":
    if harness.is_rank():
        harness.answer([*rows()])
    else:
        print(table(measured()))
