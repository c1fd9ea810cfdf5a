"""Cases of first-block caching that ranks run on whole transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallel_runtime.for_diffusers import attach
from parallel_runtime.for_diffusers.plans import plan_of
from parallel_runtime.worker.step_cache import StepCache

from ..first_block import change_between
from .meshes import mesh, parallelism
from .model_cases import error, output
from .tiny import build, inputs

NUDGE = 1e-3


def moved(made: dict[str, Any], by: float, seed: int) -> dict[str, Any]:
    """The same call with other noise on the latent, another on each token."""
    latent = made["hidden_states"]
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(seed))
    return {**made, "hidden_states": latent + by * noise}


@torch.no_grad()
def decisions_around_the_whole_change(
    rank: int, world: int, kind: str, degrees: list[int], call: dict[str, Any]
) -> list[bool]:
    """Is the second of two evaluations skipped at a threshold a little above the change that one process sees, and a
    little below?"""
    transformer, first = build(kind), inputs(kind, **call)
    second = moved(first, 0.3, seed=1)
    evaluations = [partial(output, transformer, made) for made in (first, second)]
    threshold = float(change_between(transformer, plan_of(transformer), *evaluations).max())
    attach(transformer, mesh(*degrees), parallelism(*degrees))
    return [
        _skips(transformer, kind, degrees, threshold * (1 + nudge), [first, second])[1] for nudge in (NUDGE, -NUDGE)
    ]


@torch.no_grad()
def error_while_skipping(rank: int, world: int, kind: str, degrees: list[int], call: dict[str, Any]) -> float:
    """How far cached evaluations over all ranks are from cached ones of one process that skip the same."""
    transformer, start = build(kind), inputs(kind, **call)
    other = moved(start, 2.0, seed=1)
    calls = [start, moved(start, 0.005, seed=2), other, moved(other, 0.005, seed=3), moved(other, 0.005, seed=4)]
    alone = _cached(transformer, kind, [1, 1], 0.05, calls)
    attach(transformer, mesh(*degrees), parallelism(*degrees))
    together = _cached(transformer, kind, degrees, 0.05, calls)
    assert [skipped for _, skipped in together] == [skipped for _, skipped in alone] == [False, True, False, True, True]
    return max(error(got, want) for (got, _), (want, _) in zip(together, alone, strict=True))


@torch.no_grad()
def groups_decide_for_themselves(rank: int, world: int) -> list[bool]:
    """Two groups of two ranks: the first one's prompt moves much, the second one's little."""
    place, degrees = mesh(1, 2, 2), parallelism(1, 2, 2)
    transformer, first = build("flux"), inputs("flux", text=5 if rank < 2 else 1)
    attach(transformer, place, degrees)
    cache = StepCache(transformer, plan_of(transformer), place, 0.2)
    skipped = _run(cache, transformer, [first, moved(first, 2.0 if rank < 2 else 0.02, seed=1)])
    assert cache.counts(shared=True) == [1, 4]
    return [step for _, step in skipped]


def _skips(
    transformer: nn.Module, kind: str, degrees: list[int], threshold: float, calls: list[dict[str, Any]]
) -> list[bool]:
    return [skipped for _, skipped in _cached(transformer, kind, degrees, threshold, calls)]


def _cached(
    transformer: nn.Module, kind: str, degrees: list[int], threshold: float, calls: list[dict[str, Any]]
) -> list[tuple[Tensor, bool]]:
    cache = StepCache(transformer, plan_of(transformer), mesh(*degrees), threshold)
    return _run(cache, transformer, calls)


def _run(cache: StepCache, transformer: nn.Module, calls: list[dict[str, Any]]) -> list[tuple[Tensor, bool]]:
    done = []
    with cache.caching():
        for made in calls:
            before = cache.skipped
            with cache.branch("the only one"):
                out = output(transformer, made)
            done.append((out, cache.skipped > before))
    return done
