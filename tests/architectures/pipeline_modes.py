"""The ways in which the bench of pipelines has a small FLUX evaluated, in ComfyUI's python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from parallel_runtime.architectures.network_modules import blocks_of, weight_bytes
from parallel_runtime.engine.comm.mesh import build_mesh
from parallel_runtime.engine.parallelize import parallelize, unparallelize
from parallel_runtime.engine.prefetch import BlockPrefetcher, Buffers
from parallel_runtime.engine.stages import Stages
from parallel_runtime.engine.weight_sources import HostWeights
from parallel_runtime.specs import Parallelism

from ..zoo.calls import times
from ..zoo.tiny import make, normal, seed
from .cases import error, forward, plan_of
from .weight_cases import CPU

Evaluate = Callable[[int], None]


@dataclass(eq=False)
class Mode:
    """`on` has the network evaluated so; `run` that many evaluations. `held` of the weights are here at rest."""

    name: str
    on: Callable[[], AbstractContextManager[None]]
    run: Evaluate
    weight_share: float = 1.0
    error: float = 0.0


def modes(size: dict[str, Any], by_name: dict[str, Parallelism], pixels: int, text: int) -> Iterator[Mode]:
    network = make("flux", **size)
    seed(11)
    given = dict(
        x=normal(1, 16, pixels, pixels), timestep=times(1), context=normal(1, text, 96), y=normal(1, 64),
        guidance=times(1),
    )  # fmt: skip
    plain = forward(network, given)
    yield Mode("1 rank", _nothing, lambda flights: _alone(network, given, flights))
    yield _offload(network, given, plain)
    for name, degrees in by_name.items():
        yield _divided(name, network, given, plain, degrees)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _alone(network: nn.Module, given: dict[str, Any], flights: int) -> None:
    """The other rank rests: the two share this machine's cores."""
    if dist.get_rank() == 0:
        for _ in range(flights):
            forward(network, given)


def _offload(network: nn.Module, given: dict[str, Any], plain: list[Tensor]) -> Mode:
    """Blocks are copied from main memory before they run, by a rank for itself."""
    mode = Mode("offload, 1 rank", _nothing, lambda flights: None)

    @contextmanager
    def on() -> Iterator[None]:
        own = deepcopy(network)  # a store that is closed leaves no weights
        full, store = (
            weight_bytes(own),
            BlockPrefetcher(own, HostWeights(CPU, range(2), dist.get_rank(), staged=True), Buffers(CPU)),
        )
        for block in blocks_of(own, plan_of(own).plan):
            store.add(block)
        store.seal()
        mode.weight_share = 1 - store.nonresident_bytes / full
        mode.run = lambda flights: _alone(own, given, flights)
        try:
            yield
        finally:
            mode.error = error(forward(own, given), plain)
            store.close()

    mode.on = on
    return mode


def _divided(name: str, network: nn.Module, given: dict[str, Any], plain: list[Tensor], degrees: Parallelism) -> Mode:
    known, mesh = plan_of(network), build_mesh(degrees)
    mode = Mode(name, _nothing, lambda flights: None)

    def run(flights: int) -> None:
        for _ in range(flights):
            forward(network, given)

    @contextmanager
    def by_sequence() -> Iterator[None]:
        parallelize(network, known.plan, mesh, degrees)
        try:
            yield
        finally:
            mode.error = error(forward(network, given), plain)
            unparallelize(network)

    @contextmanager
    def in_stages() -> Iterator[None]:
        full = weight_bytes(network)
        stages = Stages(network, known.plan, mesh, degrees)
        mode.weight_share = weight_bytes(network) / full

        def follow(flights: int) -> None:
            with stages.in_flight():
                stages.share_outputs([x for _ in range(flights) for x in forward(network, given)])

        mode.run = follow
        try:
            yield
        finally:
            mode.error = error(forward(network, given), plain)
            stages.close()

    mode.on, mode.run = (in_stages, run) if degrees.pipeline_degree > 1 else (by_sequence, run)
    return mode
