"""Disturb a ComfyUI at random, demand the same bits afterwards, and watch that nothing piles up."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from ..comfyui.latents import latent_of
from ..comfyui.server import Server
from ..holdings import holdings, shared_files
from .disturbances import CASES, DISTURBANCES, any_case, graph_of

MEMORY_MB = 150.0  # ComfyUI keeps every prompt in its history
SETTLE_SECONDS = 3.0


@dataclass
class Record:
    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class Soak:
    """`play` one disturbance, then `report`. What must be equal afterwards is sampled first, by fresh workers."""

    def __init__(self, server: Server, seed: int, cases: Sequence[str] = tuple(CASES)) -> None:
        self._server = server
        self._dice = random.Random(seed)
        self._records: defaultdict[str, Record] = defaultdict(Record)
        self._wanted = {case: self._sample(case) for case in reversed(cases)}  # ends with the group of most cases
        self._first = self._last = self._most = self._holdings()

    @property
    def failures(self) -> list[str]:
        return [failure for record in self._records.values() for failure in record.failures]

    def any_disturbance(self) -> str:
        return self._dice.choices(list(DISTURBANCES), [weight for _, weight in DISTURBANCES.values()])[0]

    def play(self, name: str) -> None:
        """One disturbance, and then a run that must give the bits of an undisturbed one."""
        disturb, _ = DISTURBANCES[name]
        self._note(name, lambda: disturb(self._server, self._dice))
        case = any_case(self._dice, self._wanted)
        self._note(f"run after {name}", lambda: self._check(case))
        self._server.client.settle()
        self._last = self._holdings()
        self._most = {what: max(self._most[what], amount) for what, amount in self._last.items()}

    def check_holdings(self) -> None:
        """What piled up counts as a failure. Not what is only about to go: timers wait two seconds to start workers."""
        time.sleep(SETTLE_SECONDS)
        self._last = self._holdings()
        for what, before in self._first.items():
            allowed = before + (MEMORY_MB if what.endswith("MB") else 0)
            if self._last[what] > allowed:
                self._records[what].failures.append(f"{what}: {before:.0f} at first, {self._last[what]:.0f} at the end")

    def report(self) -> str:
        lines = ["| what | times | median s | worst s | failures |", "|---|---|---|---|---|"]
        for name, record in sorted(self._records.items()):
            if record.seconds:
                middle, worst = statistics.median(record.seconds), max(record.seconds)
                times, failed = len(record.seconds), len(record.failures)
                lines.append(f"| {name} | {times} | {middle:.2f} | {worst:.2f} | {failed} |")
        lines += ["", "| held | at first | at the end | most |", "|---|---|---|---|"]
        for what, before in self._first.items():
            lines.append(f"| {what} | {before:.0f} | {self._last[what]:.0f} | {self._most[what]:.0f} |")
        return "\n".join([*lines, "", *self.failures])

    def _note(self, name: str, act: Callable[[], None]) -> None:
        started = time.monotonic()
        try:
            act()
        except Exception as failure:
            self._records[name].failures.append(f"{name}: {type(failure).__name__}: {failure}")
            self._server.client.settle()
        self._records[name].seconds.append(time.monotonic() - started)

    def _sample(self, case: str) -> torch.Tensor:
        return latent_of(self._server.client.run(graph_of(case), timeout=180))

    def _check(self, case: str) -> None:
        assert torch.equal(self._sample(case), self._wanted[case]), f"{case}: other bits than the first run's"

    def _holdings(self) -> dict[str, float]:
        server, workers = holdings(self._server.process.pid), self._server.workers()
        each = [holdings(worker.pid) for worker in workers.values()]
        return {
            "ComfyUI: descriptors": server.descriptors,
            "ComfyUI: threads": server.threads,
            "ComfyUI: MB": server.memory_mb,
            "worker: descriptors": max((worker.descriptors for worker in each), default=0),
            "worker: threads": max((worker.threads for worker in each), default=0),
            "worker: MB": max((worker.memory_mb for worker in each), default=0),
            "processes": len(self._server.children()),
            "files in TMPDIR": len(os.listdir(self._server.scratch)),
            "files in /dev/shm": len(shared_files()),
        }
