"""Prints the tables of docs/your-gpus.md and docs/memory.md: what the planner expects of some machines, and how much
memory it counts for some models. Figures of cards are assumed, those of models are their published sizes.

    python -m tests.planning.your_gpus
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parallel_runtime.architectures.network_modules import Load
from parallel_runtime.planning.memory_model import Capacity, MemoryModel
from parallel_runtime.planning.network_stats import NetworkStats
from parallel_runtime.planning.resolve import ranked
from parallel_runtime.planning.run_plan import DeviceProfile, PlanInputs, RunPlan
from parallel_runtime.request import ParallelRequest
from parallel_runtime.specs import Parallelism, WeightPlacement, WeightsMode

GIB = 2**30
MAIN_MEMORY_GIB = 128


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`gib` are free on each card; bytes and FLOP a second as workers measure them when they start."""

    name: str
    gpus: int
    gib: float
    link: float
    flops: float


@dataclass(frozen=True, kw_only=True)
class Job:
    name: str
    network: NetworkStats
    tokens: int
    prompts: int


def network(name: str, heads: int, width: int, blocks: tuple[int, ...], weights: float) -> NetworkStats:
    """A network in bfloat16, of blocks with this many weights each."""
    sizes = tuple(2 * size for size in blocks)
    return NetworkStats(
        name=name, heads=heads, layers=len(blocks), width=width, weights=int(weights), weight_bytes=2 * int(weights),
        blocks=sizes, loads=tuple(map(Load, sizes)),
    )  # fmt: skip


MILLION = 10**6
FLUX = network("FLUX.1", 24, 3072, (340 * MILLION,) * 19 + (141 * MILLION,) * 38, 11.9e9)
FLUX2 = network("FLUX.2 dev", 48, 6144, (981 * MILLION,) * 8 + (491 * MILLION,) * 48, 32.2e9)
QWEN = network("Qwen-Image", 24, 3072, (340 * MILLION,) * 60, 20.4e9)
WAN = network("Wan 14B", 40, 5120, (351 * MILLION,) * 40, 14.3e9)
MINIMAX_H3 = network("MiniMax H3", 56, 7168, (389 * MILLION,) * 50, 20.2e9)

JOBS = (
    Job(name="FLUX.1 dev, 1024 x 1024", network=FLUX, tokens=4608, prompts=1),
    Job(name="Qwen-Image, 1328 x 1328, both prompts", network=QWEN, tokens=7000, prompts=2),
    Job(name="Wan 14B, 832 x 480, 81 frames, both prompts", network=WAN, tokens=32760, prompts=2),
    Job(name="MiniMax H3, 1344 x 768, 124 frames", network=MINIMAX_H3, tokens=38000, prompts=1),
)
MACHINES = (
    Machine(name="2 x 4090, PCIe", gpus=2, gib=22, link=1e10, flops=1.4e14),
    Machine(name="2 x 5090, PCIe", gpus=2, gib=30, link=2e10, flops=1.9e14),
    Machine(name="4 x 3090, PCIe", gpus=4, gib=22, link=1e10, flops=6e13),
    Machine(name="2 x 3090, NVLink", gpus=2, gib=22, link=4e10, flops=6e13),
    Machine(name="8 x H100, NVLink", gpus=8, gib=76, link=2.5e11, flops=7e14),
)


def plan(machine: Machine, job: Job, gpus: int) -> RunPlan:
    work = job.network.work(1, job.tokens, prompts=job.prompts, recorded=True)
    capacity = Capacity(device_bytes=int(machine.gib * GIB), host_bytes=MAIN_MEMORY_GIB * GIB)
    profile = DeviceProfile(bytes_per_second=machine.link, flops_per_second=machine.flops, host_bytes_per_second=2e10)
    inputs = PlanInputs(
        request=ParallelRequest(), network=job.network, gpus=gpus, guided=job.prompts > 1, work=work, capacity=capacity,
        profile=profile,
    )  # fmt: skip
    return ranked(inputs)[0]


def in_words(chosen: RunPlan, alone: RunPlan) -> str:
    degrees = chosen.degrees
    names = {"cfg": degrees.cfg_degree, "Ulysses": degrees.ulysses_degree, "ring": degrees.ring_degree}
    split = " x ".join(f"{name} {degree}" for name, degree in names.items() if degree > 1)
    assert chosen.estimate is not None
    assert chosen.estimate.fits, chosen
    return f"{split}, {chosen.weights.mode}: {time_in_words(chosen.seconds)}, {alone.seconds / chosen.seconds:.1f} x"


def time_in_words(seconds: float) -> str:
    """Returns two digits, in the units of the README."""
    digits = f"{seconds:.2g}"
    return f"{1000 * float(digits):g} ms" if float(digits) < 1 else f"{digits} s"


def machine_rows() -> Iterator[str]:
    yield "| GPUs | " + " | ".join(job.name for job in JOBS) + " |"
    yield "|---" * (len(JOBS) + 1) + "|"
    for machine in MACHINES:
        cells = [in_words(plan(machine, job, machine.gpus), plan(machine, job, 1)) for job in JOBS]
        yield f"| {machine.name} | {' | '.join(cells)} |"


MEMORY_JOBS = (
    ("FLUX.1 dev, 1024 x 1024", FLUX, 4608),
    ("FLUX.2 dev, 1024 x 1024", FLUX2, 4608),
    ("Qwen-Image, 1328 x 1328", QWEN, 7000),
    ("Wan 14B, 832 x 480, 81 frames", WAN, 32760),
    ("Wan 14B, 1280 x 720, 81 frames", WAN, 75600),
    ("MiniMax H3, 1344 x 768, 124 frames", MINIMAX_H3, 38000),
)


def memory_rows() -> Iterator[str]:
    yield "| model, one prompt | weights | replicate, 1 / 2 / 4 GPUs | shard, 2 / 4 GPUs | offload, 1 / 2 / 4 GPUs |"
    yield "|---|---|---|---|---|"
    for name, bf16, tokens in MEMORY_JOBS:
        for kind, network in (("bf16", bf16), ("int8" if bf16 is MINIMAX_H3 else "fp8", bf16.halved())):
            cells = [needed(network, tokens, mode) for mode in ("replicate", "shard", "offload")]
            yield f"| {name} | {kind}, {network.weight_bytes / GIB:.0f} | {' | '.join(cells)} |"


def needed(network: NetworkStats, tokens: int, mode: WeightsMode) -> str:
    """What each GPU needs at its peak, in GiB, with as few weights on it as the mode allows."""
    gib = []
    for gpus in (2, 4) if mode == "shard" else (1, 2, 4):
        work, degrees = network.work(1, tokens), Parallelism(ulysses_degree=gpus)
        memory = MemoryModel(work=work, degrees=degrees, capacity=Capacity())
        weights = memory.shard(0) if mode == "shard" else WeightPlacement(mode=mode)
        gib.append(f"{max(memory.needed_bytes_by_rank(weights)) / GIB:.0f}")
    return " / ".join(gib)


if __name__ == "__main__":
    print("\n".join([*machine_rows(), "", *memory_rows()]))
