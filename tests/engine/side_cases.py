"""Cases that ranks run on attentions whose queries and keys differ in streams, or of which a stream is held whole.

Errors are max |difference| over the reference's standard deviation.
"""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor

from parallel_runtime.engine.attention.context_attention import ContextAttention
from parallel_runtime.engine.comm import collectives
from parallel_runtime.engine.comm.mesh import ContextMesh
from parallel_runtime.engine.split.streams import Streams

from .cases import chunk, nan_filled, own, rows, run
from .meshes import mesh, parallelism
from .reference import Problem, attention, random_problem


def cross_errors(rank: int, world: int, degrees: list[int], seeds: list[int], replicated: list[str]) -> list[float]:
    """Queries of a stream of their own, over the keys of two others; every spare buffer is full of NaN."""
    collectives.empty = collectives.zeros = nan_filled
    try:
        return [_cross_error(mesh(*degrees), seed, degrees, frozenset(replicated)) for seed in seeds]
    finally:
        collectives.empty, collectives.zeros = torch.empty, torch.zeros


def replica_errors(rank: int, world: int, degrees: list[int], seeds: list[int], replicated: list[str]) -> list[float]:
    """Errors of a joint attention whose text or image every rank holds whole."""
    collectives.empty = collectives.zeros = nan_filled
    try:
        return [_replica_error(mesh(*degrees), seed, degrees, frozenset(replicated)) for seed in seeds]
    finally:
        collectives.empty, collectives.zeros = torch.empty, torch.zeros


def pair_errors(rank: int, world: int, degrees: list[int], seeds: list[int], method: str) -> list[float]:
    """Errors where each query has a mask of its own, and some no key at all."""
    collectives.empty = collectives.zeros = nan_filled
    try:
        return [_pair_error(mesh(*degrees), seed, degrees, method) for seed in seeds]
    finally:
        collectives.empty, collectives.zeros = torch.empty, torch.zeros


def _pair_error(place: ContextMesh, seed: int, degrees: list[int], method: str) -> float:
    problem = random_problem(seed, masked=False)
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, tokens, heads, _ = problem.query.shape
    shape = (choose.choice((1, batch)), choose.choice((1, heads)), tokens, tokens)
    mask = torch.rand(shape, generator=generator) < 0.3
    mask[:, :, choose.randrange(tokens)] = False
    q, k, v = (tensor.double().transpose(1, 2) for tensor in (problem.query, problem.key, problem.value))
    scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
    full = (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2)
    given = mask if choose.random() < 0.5 else torch.zeros(shape).masked_fill(~mask, -torch.inf)
    got = run(problem, degrees, given, {"rotate_method": method}, place)
    kept = rows(problem, place)
    return _distance(got[:, kept], own(full, problem, place)[:, kept], full) if kept.any() else 0.0


def _cross_error(place: ContextMesh, seed: int, degrees: list[int], replicated: frozenset[str]) -> float:
    problem = random_problem(seed)
    count = random.Random(seed).choice((1, 2, 3, 17, 90))
    batch, _, heads, dim = problem.query.shape
    problem = replace(problem, query=_random_query(seed, (batch, count, heads, dim)))
    streams = _seen({"audio": count, **problem.lengths}, place, replicated)
    attend_together = ContextAttention(place, parallelism(*degrees), streams, ("audio",), tuple(problem.lengths))
    q = _local_tokens(problem.query, {"audio": count}, place, replicated)
    k, v, mask = _keys(problem, place, replicated)
    full = attention(problem)
    expected = _local_tokens(full, {"audio": count}, place, replicated)
    got = attend_together(q, k, v, mask)
    if "audio" not in replicated and not chunk(full, place, 0).shape[1]:
        assert not got.any()
        return 0.0
    return _distance(got, expected, full)


def _random_query(seed: int, shape: tuple[int, ...]) -> Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _replica_error(place: ContextMesh, seed: int, degrees: list[int], replicated: frozenset[str]) -> float:
    problem = random_problem(seed)
    streams = _seen(problem.lengths, place, replicated)
    attend_together = ContextAttention(
        place, parallelism(*degrees), streams, tuple(problem.lengths), tuple(problem.lengths)
    )
    k, v, mask = _keys(problem, place, replicated)
    full = attention(problem)
    got = attend_together(_local_tokens(problem.query, problem.lengths, place, replicated), k, v, mask)
    expected = _local_tokens(full, problem.lengths, place, replicated)
    for name, part in zip(problem.lengths, full.split(list(problem.lengths.values()), 1), strict=True):
        if name not in replicated and not chunk(part, place, 0).shape[1]:  # a stand-in, whose output is zero
            expected[:, 0 if name == "text" else -1] = 0
    return _distance(got, expected, full)


def _seen(lengths: dict[str, int], place: ContextMesh, replicated: frozenset[str]) -> Streams:
    streams = Streams(place.context, replicated)
    for name, length in lengths.items():
        streams.record_length(name, length, name)
    return streams


def _local_tokens(full: Tensor, lengths: dict[str, int], place: ContextMesh, replicated: frozenset[str]) -> Tensor:
    parts = zip(lengths, full.split(list(lengths.values()), dim=1), strict=True)
    return torch.cat([part if name in replicated else chunk(part, place, 1) for name, part in parts], dim=1)


def _keys(problem: Problem, place: ContextMesh, replicated: frozenset[str]) -> tuple[Tensor, Tensor, Tensor | None]:
    key, value = (_local_tokens(tensor, problem.lengths, place, replicated) for tensor in (problem.key, problem.value))
    if problem.mask is None:
        return key, value, None
    mask = _local_tokens(problem.mask, problem.lengths, place, replicated)
    return key, value, mask.reshape(*mask.shape[:2], -1).permute(0, 2, 1)[:, :, None, :]


def _distance(got: Tensor, expected: Tensor, full: Tensor) -> float:
    assert got.shape == expected.shape
    assert not got.isnan().any(), "NaN"
    return float((got.double() - expected).abs().max() / full.std())
