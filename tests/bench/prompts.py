"""Prints the bytes that each new prompt loads onto two GPUs of 24 GiB, reckoned by the planner: with ComfyUI's own text
encoder on GPU 0, where it pushes weights of the network out, and with CP CLIP. Sizes are published ones; nothing is
measured. The first load of each file is left out.

    python -m tests.bench.prompts
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parallel_runtime.planning.network_stats import NetworkStats
from parallel_runtime.planning.resolve import EncoderPlacement, EncoderSize, place_encoder
from parallel_runtime.planning.run_plan import RunPlan

from ..planning.your_gpus import FLUX, FLUX2, GIB, QWEN, Job, Machine, plan

TWO = Machine(name="CP_MEMORY_GIB=24 on two workers", gpus=2, gib=24, link=1e10, flops=1.4e14)
BUDGET = int(TWO.gib * GIB)
WORKSPACE = int(1.2 * GIB)  # what ComfyUI keeps free for an encoder at least

# Parameters: the embedding; the blocks' attention and MLP; the vision tower's blocks.
T5 = EncoderSize(layers=(32128 * 4096,), blocks=(4 * 4096**2 + 3 * 4096 * 10240,) * 24)
QWEN_VL = EncoderSize(
    layers=(152064 * 3584,),
    blocks=(2 * 3584**2 + 2 * 512 * 3584 + 3 * 3584 * 18944,) * 28 + (4 * 1280**2 + 3 * 1280 * 3420,) * 32,
)
MISTRAL = EncoderSize(layers=(131072 * 5120,), blocks=(2 * 5120 * 4096 + 2 * 5120 * 1024 + 3 * 5120 * 32768,) * 40)
PAIRS = (
    ("FLUX.1 dev", FLUX, 4608, 1, "T5-XXL", T5),
    ("Qwen-Image", QWEN, 7000, 2, "Qwen2.5-VL 7B", QWEN_VL),
    ("FLUX.2 dev", FLUX2, 4608, 1, "Mistral 24B", MISTRAL),
)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What a prompt loads, in bytes: of the encoder, and of the network, which has made room for it."""

    encoder: int
    network: int

    def __str__(self) -> str:
        return f"{self.encoder / GIB:.1f} + {self.network / GIB:.1f}"


def encoder_of(parameters: EncoderSize, item_bytes: int) -> EncoderSize:
    layers, blocks = (tuple(item_bytes * each for each in sizes) for sizes in (parameters.layers, parameters.blocks))
    return EncoderSize(layers=layers, blocks=blocks, workspace=WORKSPACE)


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


def rows() -> Iterator[str]:
    yield "| GiB a prompt | network | encoder | ComfyUI alone: encoder + network | CP CLIP: encoder + network | where |"
    yield "|---|---|---|---|---|---|"
    for name, bf16, tokens, prompts, encoder, parameters in PAIRS:
        for (network_kind, network), (kind, item_bytes) in kinds(bf16):
            planned = plan(TWO, Job(name=name, network=network, tokens=tokens, prompts=prompts), TWO.gpus)
            size = encoder_of(parameters, item_bytes)
            after, placed = with_cp_clip(planned, size)
            cells = [
                f"{name} with {encoder}",
                f"{network_kind}, {network.weight_bytes / GIB:.0f}, {planned.weights.mode}",
                f"{kind}, {size.weights / GIB:.1f}",
                str(natively(planned, size)),
                str(after),
                where(placed) + ("" if placed.beside else ", the network makes room"),
            ]
            yield f"| {' | '.join(cells)} |"


def kinds(bf16: NetworkStats) -> Iterator[tuple[tuple[str, NetworkStats], tuple[str, int]]]:
    yield ("bf16", bf16), ("bf16", 2)
    yield ("bf16", bf16), ("fp8", 1)
    yield ("fp8", bf16.halved()), ("fp8", 1)


if __name__ == "__main__":
    print("\n".join(rows()))
