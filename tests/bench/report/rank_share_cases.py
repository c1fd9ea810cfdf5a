"""Times a rank's share of one evaluation without communication: a fake group transfers nothing. Eager, recorded as one
CUDA graph, compiled and recorded. What it computes is garbage: only times count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel_runtime.architectures.network_modules import blocks_of
from parallel_runtime.engine.comm.mesh import build_mesh
from parallel_runtime.engine.cuda_graphs import compile_blocks
from parallel_runtime.specs import Compilation, Parallelism

from .measuring import NO_GRAPHS, Case, Clock, Measurement, Setting, unbroken
from .network_cases import Subject, divided, plan_of, subjects

WORLD_SIZES = (2, 4, 8)


def cases(setting: Setting, device: torch.device) -> Iterator[Case]:
    for subject in subjects(setting):
        labels = {"what": subject.name}
        yield from unbroken(labels, _of_subject(subject, labels, device))


def degrees(world_size: int) -> Iterator[tuple[str, Parallelism]]:
    """Yields degrees with their names, Ulysses first: alone it is also compiled."""
    yield f"Ulysses {world_size}", Parallelism(ulysses_degree=world_size)
    yield f"ring {world_size}", Parallelism(ring_degree=world_size)
    if world_size > 2:
        yield f"ring 2 x Ulysses {world_size // 2}", Parallelism(ring_degree=2, ulysses_degree=world_size // 2)


@contextmanager
def fake_group(world_size: int) -> Iterator[None]:
    """A process group of the fake backend, in which this process is rank 0 and no other rank exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def rank_share(
    network: nn.Module, parallelism: Parallelism, device: torch.device, *, compiled: bool = False
) -> Iterator[None]:
    """Has the network compute the first rank's share in this context."""
    with ExitStack() as undo:
        undo.enter_context(fake_group(parallelism.world_size))
        undo.enter_context(divided(network, build_mesh(parallelism, device), parallelism))
        if compiled:
            undo.callback(compile_blocks(blocks_of(network, plan_of(network).plan, carrying=True), Compilation()))
        yield


def _of_subject(subject: Subject, labels: Measurement, device: torch.device) -> Iterator[Case]:
    network, inputs = subject.build(torch.bfloat16, device), subject.inputs(device)
    clock = Clock(lambda: network(**inputs, transformer_options={}), device)
    modes = {"eager": clock.eager, "recorded": clock.recorded}
    for mode, measure in modes.items():
        yield Case(labels | {"degrees": "1 rank", "mode": mode}, measure)
    for words, parallelism in (each for world_size in WORLD_SIZES for each in degrees(world_size)):
        within = partial(rank_share, network, parallelism, device)
        for mode, measure in modes.items():
            yield Case(labels | {"degrees": words, "mode": mode}, measure, within=within)
    compiled = clock.recorded if device.type == "cuda" else partial(dict, note=NO_GRAPHS)
    for world_size in (8, 1, 4, 2):  # last, since compiling takes its time
        words = f"Ulysses {world_size}" if world_size > 1 else "1 rank"
        within = partial(rank_share, network, Parallelism(ulysses_degree=world_size), device, compiled=True)
        yield Case(labels | {"degrees": words, "mode": "compiled and recorded"}, compiled, within=within)
