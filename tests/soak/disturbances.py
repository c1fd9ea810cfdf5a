"""What a soak test does to a running ComfyUI, and what must come of it at once: each raises where it does not."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from ..comfyui.cases import DEGREES
from ..comfyui.client import Graph, Interrupted, NodeError
from ..comfyui.graphs import Job, Parallel, longer, sampling_graph, with_attention_patch
from ..comfyui.processes import maps
from ..comfyui.server import Server


@dataclass(frozen=True, kw_only=True)
class Case:
    job: Job
    parallel: Parallel
    often: float = 4


CASES: dict[str, Case] = {
    "flux, ring": Case(job=Job(family="flux_dev", cfg=2.0), parallel=DEGREES["ring_2"]),
    "flux, ulysses": Case(
        job=Job(family="flux_dev", cfg=2.0, batch=2, size=(17, 23), sampler="dpmpp_2m_sde"),
        parallel=DEGREES["ulysses_2"],
    ),
    "wan, ring": Case(job=Job(family="wan_t2v", cfg=2.0), parallel=DEGREES["ring_2"]),
    # In a group of its own, which takes its time to start.
    "flux, one worker": Case(job=Job(family="flux_dev", cfg=2.0), parallel=DEGREES["1_worker"], often=0.5),
}

PAIRS = [name for name, case in CASES.items() if case.parallel != DEGREES["1_worker"]]

SECONDS = {"CP_STALL_SECONDS": "10", "CP_LOAD_SECONDS": "30", "CP_CANCEL_SECONDS": "3"}  # in the server's environment
CANCELLED_WITHIN = 1.0  # and a step
FIRST_STEP = 4.0
DEAD_WITHIN = 2.0
FREED_WITHIN = 2.0
STALLED_WITHIN = 10 + 3.0
STARTED_WITHIN = 120.0
FRESH_WITHIN = 30.0  # workers start and run

DEATHS = (signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGTERM, signal.SIGSTOP)
NAMED = "was killed by SIG|has been silent|ended before they were up|while starting|went away with torchrun"

Disturbance = Callable[[Server, random.Random], None]


def with_weights(mode: str) -> dict[str, Case]:
    """The cases, with their models' weights at rest there."""
    return {name: replace(case, parallel=replace(case.parallel, weights=mode)) for name, case in CASES.items()}


def any_case(dice: random.Random, among: Iterable[str] = CASES) -> str:
    names = list(among)
    return dice.choices(names, [CASES[name].often for name in names])[0]


def graph_of(case: str, *, steps: int = 0) -> Graph:
    job = CASES[case].job
    return sampling_graph(longer(job, steps=steps) if steps else job, "CPSampler", CASES[case].parallel)


def cancel(server: Server, dice: random.Random) -> None:
    """/interrupt at a random time, with and without prompt_id: the run ends as interrupted, the workers stay."""
    with long_run(server, dice) as (prompt, since):
        time.sleep(dice.uniform(0, 1.5))
        step = step_seconds(server, since)
        before, asked = server.workers(), time.monotonic()
        if dice.random() < 0.5:
            server.client.interrupt(prompt)
        else:
            server.client.post("/interrupt")
        try:
            server.client.finish(prompt, since=since, timeout=30)
        except Interrupted:
            within(asked, CANCELLED_WITHIN + (FIRST_STEP if step is None else step))
        else:
            raise AssertionError("the run went on after its cancel")
        assert step is None or server.workers() == before, "the workers changed"


def kill(server: Server, dice: random.Random) -> None:
    """A random signal to a random rank, or SIGKILL to torchrun, at a random time of a run."""
    death = dice.choice(DEATHS)
    another_group_ends = len(server.workers()) == 1
    with long_run(server, dice, PAIRS) as (prompt, since):
        if stepped := death is signal.SIGSTOP or another_group_ends or dice.random() < 0.8:
            server.client.wait_for_step(1, since=since, timeout=STARTED_WITHIN)
        time.sleep(dice.uniform(0, 1.0))
        while not (victims := [child for child in server.children() if "parallel_runtime.worker" in child.command]):
            time.sleep(0.02)
        victim, at = dice.choice(victims), time.monotonic()
        os.kill(victim.pid, signal.SIGKILL if victim.rank is None else death)
        if not stepped and replaced(server, prompt, {victim.pid for victim in victims}):
            server.client.interrupt(prompt)  # they were idle still: the run goes on with other workers
            with suppress(Interrupted):
                server.client.finish(prompt, since=since, timeout=60)
            return
        error = failure_of(server, prompt, since)
        within(at, STALLED_WITHIN if death is signal.SIGSTOP else DEAD_WITHIN)
        assert any(part in error for part in NAMED.split("|")), f"{death.name}: {error}"


def replaced(server: Server, prompt: str, pids: set[int]) -> bool:
    """Waits until the run has ended, or until other workers than these are there."""
    while any(item[1] == prompt for item in server.client.pending()[0]):
        workers = {worker.pid for worker in server.workers().values()}
        if workers and not workers & pids:
            return True
        time.sleep(0.05)
    return False


def kill_idle(server: Server, dice: random.Random) -> None:
    """A rank that dies or hangs while nothing runs costs no run: the next one starts other workers, in time."""
    if before := server.workers():
        os.kill(dice.choice(list(before.values())).pid, dice.choice(DEATHS))
        time.sleep(dice.uniform(0, 1))
        server.client.run(graph_of("flux, ring"), timeout=STALLED_WITHIN + FRESH_WITHIN)
        pids = [{worker.pid for worker in workers.values()} for workers in (before, server.workers())]
        assert not set.intersection(*pids), "a worker is left of the group that lost one"


def free(server: Server, dice: random.Random) -> None:
    """/free in any of its forms: the workers let go of the model's file and stay."""
    before, asked = server.workers(), time.monotonic()
    server.client.post("/free", **dice.choice([{"unload_models": True}, {"free_memory": True}]))
    while any(maps(worker.pid, ".safetensors") for worker in server.workers().values()):
        within(asked, FREED_WITHIN)
        time.sleep(0.02)
    assert server.workers() == before, "the workers changed"


def clear_queue(server: Server, dice: random.Random) -> None:
    """Runs that wait are dropped, the one that runs goes on until its own cancel."""
    with long_run(server, dice) as (prompt, since):
        waiting = [queued(server, any_case(dice))[0] for _ in range(3)]
        server.client.post("/queue", clear=True)
        running, pending = server.client.pending()
        assert [item[1] for item in running] == [prompt]
        assert not pending
        server.client.interrupt(prompt)
        with suppress(Interrupted):
            server.client.finish(prompt, since=since, timeout=60)
        assert not set(waiting) & server.client.get("/history").keys()


def bad_input(server: Server, dice: random.Random) -> None:
    """Refused by name, before a worker is asked."""
    graph = graph_of("flux, ring")
    kind = dice.choice(["latent", "width", "patch", "devices"])
    if kind == "latent":
        graph["latent"]["inputs"]["shape"] = dice.choice(
            ["16,16,24", "1,16,0,8"]
        )  # ComfyUI gives an empty latent the right channels
    elif kind == "width":
        graph["negative"]["inputs"]["spec"] = '{"tokens": 5, "dim": 96, "pooled": 64}'
    elif kind == "devices":
        graph["config"]["inputs"]["devices"] = dice.choice(["cuda:7", "cpu", "banana", "cpu,cpu,cpu"])
    else:
        graph = with_attention_patch(graph)
    before = server.workers()
    since = server.client.now()
    error = failure_of(server, server.client.queue(graph), since)
    assert "Refused" in error, f"{kind}: {error}"
    assert server.workers() == before, "the workers changed"


def queued(server: Server, case: str, *, steps: int = 0) -> tuple[str, int]:
    since = server.client.now()
    return server.client.queue(graph_of(case, steps=steps)), since


@contextmanager
def long_run(server: Server, dice: random.Random, among: Iterable[str] = CASES) -> Iterator[tuple[str, int]]:
    """(prompt, mark) of a run that has reached its sampler and would go on for minutes."""
    prompt, since = queued(server, any_case(dice, among), steps=5000)
    server.client.wait(lambda e: e.kind == "executing" and e.data["node"] == "sampler", 60, since)
    yield prompt, since


def step_seconds(server: Server, since: int) -> float | None:
    """The longest step of the run so far. None where it has not come that far: the group may still be starting."""
    steps = [event for event in server.client.events(since) if event.kind == "progress"]
    took = [(b.at - a.at) / max(1, b.data["value"] - a.data["value"]) for a, b in pairwise(steps)]
    return max(took, default=None)


def failure_of(server: Server, prompt: str, since: int) -> str:
    try:
        server.client.finish(prompt, since=since, timeout=60)
    except NodeError as error:
        return str(error)
    raise AssertionError("the run did not fail")


def within(since: float, seconds: float) -> None:
    took = time.monotonic() - since
    assert took < seconds, f"{took:.1f} s, at most {seconds:.0f} s were promised"


DISTURBANCES: dict[str, tuple[Disturbance, float]] = {  # and how often
    "cancel": (cancel, 6),
    "kill": (kill, 1),
    "kill idle": (kill_idle, 0.5),
    "free": (free, 5),
    "clear queue": (clear_queue, 1),
    "bad input": (bad_input, 3),
}
