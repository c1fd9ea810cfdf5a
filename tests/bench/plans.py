"""Prints what auto takes on 12 machines for 6 works, estimated by the planner, beside what the fastest GPU takes alone.
Figures of cards are assumed (tests/planning/your_gpus.py has those of the docs); bf16 files, launches not recorded.

    python -m tests.bench.plans
    python -m tests.bench.plans --recorded
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from parallel_runtime.planning.memory_model import Capacity
from parallel_runtime.planning.network_stats import NetworkStats, Work
from parallel_runtime.planning.resolve import ranked
from parallel_runtime.planning.run_plan import DeviceProfile, PlanInputs, RunPlan, Speed
from parallel_runtime.request import ParallelRequest

from ..planning.test_by_rows import SDXL
from ..planning.your_gpus import FLUX, QWEN, WAN

GIB = 2**30
RTX_3090, RTX_4090, RTX_5090 = (65e12, 55e12, 22), (150e12, 130e12, 22), (210e12, 180e12, 30)
A100, H100 = (260e12, 190e12, 76), (560e12, 400e12, 76)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`cards` have FLOP/s of products and of attention, and free GiB each; `link` is bytes/s between two, `host` from
    main memory to each while all copy."""

    name: str
    cards: tuple[tuple[float, float, int], ...]
    link: float
    host: float

    def inputs(self, work: Work, cards: tuple[int, ...] | None = None) -> PlanInputs:
        """Returns the inputs of planning `work` for these cards; None: for all."""
        own = self.cards if cards is None else tuple(self.cards[card] for card in cards)
        speeds = tuple(Speed(products=products, attention=attention) for products, attention, _ in own)
        profile = DeviceProfile(
            bytes_per_second=self.link if len(own) > 1 else 0.0,
            flops_per_second=min(speed.products for speed in speeds),
            host_bytes_per_second=self.host,
            ranks=speeds,
        )
        budgets = [gib * GIB for _, _, gib in own]
        return PlanInputs(
            request=ParallelRequest(), network=work.network, gpus=len(own), guided=work.prompts > 1, work=work,
            profile=profile, capacity=Capacity.of_each(budgets, host_bytes=128 * GIB),
        )  # fmt: skip


MACHINES = (
    Machine(name="2 x 4090, 5 GB/s", cards=(RTX_4090,) * 2, link=5e9, host=12e9),
    Machine(name="2 x 4090, 10 GB/s", cards=(RTX_4090,) * 2, link=10e9, host=24e9),
    Machine(name="2 x 5090, 20 GB/s", cards=(RTX_5090,) * 2, link=20e9, host=45e9),
    Machine(name="2 x 3090, NVLink", cards=(RTX_3090,) * 2, link=40e9, host=24e9),
    Machine(name="4 x 3090, 3 GB/s", cards=(RTX_3090,) * 4, link=3e9, host=6e9),
    Machine(name="4 x 3090, 6 GB/s", cards=(RTX_3090,) * 4, link=6e9, host=12e9),
    Machine(name="4 x 4090, 10 GB/s", cards=(RTX_4090,) * 4, link=10e9, host=20e9),
    Machine(name="3090 + 4090, 6 GB/s", cards=(RTX_3090, RTX_4090), link=6e9, host=12e9),
    Machine(name="4090 + 5090, 10 GB/s", cards=(RTX_4090, RTX_5090), link=10e9, host=24e9),
    Machine(name="2 x A100, NVLink", cards=(A100,) * 2, link=200e9, host=24e9),
    Machine(name="4 x A100, NVLink", cards=(A100,) * 4, link=200e9, host=24e9),
    Machine(name="8 x H100, NVLink", cards=(H100,) * 8, link=300e9, host=50e9),
)


def _work(network: NetworkStats, tokens: int, prompts: int = 2, row_ranks: int = 0) -> Work:
    return replace(network.work(1, tokens, prompts=prompts), row_ranks=row_ranks)


WORKS = {
    "FLUX 512": _work(FLUX, 1024 + 512, prompts=1),
    "FLUX 1024": _work(FLUX, 4096 + 512, prompts=1),
    "Wan 480p": _work(WAN, 32_760),
    "Wan 720p": _work(WAN, 75_600),
    "SDXL 1024": _work(SDXL, 128 * 128, row_ranks=32),
    "Qwen 1328": _work(QWEN, 7000),
}


def in_words(plan: RunPlan) -> str:
    degrees = plan.degrees
    named = {"data": degrees.data_degree, "cfg": degrees.cfg_degree, "U": degrees.ulysses_degree}
    named |= {"ring": degrees.ring_degree, "stages": degrees.pipeline_degree}
    split = " x ".join(f"{name} {degree}" for name, degree in named.items() if degree > 1) or "one GPU"
    fetched = "" if plan.weights.mode == "replicate" else f", {plan.weights.mode}"
    return split + fetched + (f", without {len(plan.left_out)}" if plan.left_out else "")


def compared(machine: Machine, work: Work) -> tuple[RunPlan, float]:
    """Returns the plan that auto takes, and the seconds of the fastest card alone."""
    alone = (ranked(machine.inputs(work, (card,)))[0].seconds for card in range(len(machine.cards)))
    return ranked(machine.inputs(work))[0], min(alone)


def rows(recorded: bool) -> Iterator[str]:
    yield "| estimated | " + " | ".join(WORKS) + " |"
    yield "|---" * (len(WORKS) + 1) + "|"
    for machine in MACHINES:
        cells = []
        for work in WORKS.values():
            plan, alone = compared(machine, replace(work, recorded=recorded))
            cells.append(f"{in_words(plan)}: {plan.seconds:.3g} of {alone:.3g} s")
        yield f"| {machine.name} | {' | '.join(cells)} |"


def main(arguments: Any = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--recorded", action="store_true")
    started = time.perf_counter()
    print("\n".join(rows(parser.parse_args(arguments).recorded)))
    count = len(MACHINES) * len(WORKS)
    print(f"\n{1e3 * (time.perf_counter() - started) / count:.0f} ms for each cell")


if __name__ == "__main__":
    main()
