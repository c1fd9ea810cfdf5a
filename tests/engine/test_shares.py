"""Ranks of unequal shares: each holds in proportion to its own, and together they are as exact as equal ones."""

from __future__ import annotations

import random
import zlib
from typing import Any

import pytest
import torch

from parallel_runtime.engine.attention.ring_and_ulysses import head_chunks
from parallel_runtime.engine.comm.mesh import ContextMesh, MeshDim
from parallel_runtime.engine.split.streams import Streams, chunk_range, chunk_sizes
from parallel_runtime.specs import Parallelism

from .conftest import Groups
from .share_cases import random_shares
from .test_models import BAR, CALLS

CASES = "tests.engine.share_cases"
DEGREES = [(2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (1, 4), (2, 2)]


def test_sizes_are_quotas_rounded_and_cover_everything() -> None:
    choose = random.Random(5)
    for _ in range(500):
        shares, total = random_shares(choose, choose.randint(1, 8)), choose.randint(0, 5000)
        sizes = chunk_sizes(total, shares)
        assert sum(sizes) == total
        for index, (size, share) in enumerate(zip(sizes, shares, strict=True)):
            assert abs(size - total * share / sum(shares)) < 1
            assert size == 0 or share
            assert chunk_range(total, shares, index) == (sum(sizes[:index]), size)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("share", [1, 3, 64])
def test_equal_shares_are_no_shares(parts: int, share: int) -> None:
    for total in range(60):
        assert chunk_sizes(total, (share,) * parts) == chunk_sizes(total, parts)


def test_shares_are_proportions() -> None:
    assert chunk_sizes(4608, (3, 2)) == chunk_sizes(4608, (60, 40)) == (2765, 1843)
    assert chunk_sizes(10, (1, 0)) == (10, 0)


def place(shares: tuple[int, ...], index: int, ring: int, ulysses: int, data: int = 1) -> ContextMesh:
    """Rank `index` of those that `shares` are of."""
    group, own = divmod(index, ring * ulysses)
    return ContextMesh(
        data=MeshDim(size=data, index=group),
        ring=MeshDim(size=ring, index=own // ulysses),
        ulysses=MeshDim(size=ulysses, index=own % ulysses),
        context=MeshDim(size=ring * ulysses, index=own),
    ).with_shares(shares)


def test_tokens_heads_and_rows_go_by_shares() -> None:
    mesh = place((1, 2, 3, 4, 10, 10, 10, 10), 2, ring=2, ulysses=2, data=2)
    streams = Streams(mesh.context)
    streams.record_length("image", 100, "here")
    assert streams.sizes("image") == (10, 20, 30, 40)
    assert streams.chunk("image") == (30, 30)
    assert chunk_sizes(10, mesh.ulysses.parts) == (4, 6), "heads of both rings together, 1 + 3 and 2 + 4"
    assert chunk_sizes(5, mesh.data.parts) == (1, 4), "rows, 10 and 40"
    assert place((1, 2, 3, 4, 10, 10, 10, 10), 6, 2, 2, 2).context.shares == (10, 10, 10, 10)


def test_stages_of_a_pipeline_cut_alike() -> None:
    mesh = place((1, 1, 1, 1, 1, 1, 1, 1), 0, ring=1, ulysses=2, data=2)
    assert (mesh.context.shares, mesh.data.shares) == ((2, 2), (4, 4))


def test_heads_travel_in_proportion() -> None:
    query, spread = torch.empty(1, 10, 24, 8), (60, 40)
    for index, heads in enumerate((14, 10)):
        (chunk,) = head_chunks(place((3, 2), index, 1, 2), query, (24, 24), (spread, spread), True)
        assert chunk.inbound.heads == (heads,)
        assert chunk.first == 14 * index


@pytest.mark.parametrize(
    ("shares", "says"),
    [
        ((3, 2, 1), "shares are one per worker, 2 of them, got 3: 3,2,1"),
        ((3,), "2 of them, got 1: 3"),
        ((3, -1), "start at 0, got 3,-1"),
        ((0, 0), "shares 0,0 gives a prompt or an image to nobody"),
    ],
)
def test_shares_that_cannot_be_are_refused(shares: tuple[int, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Parallelism(ulysses_degree=2, shares=shares)


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_random_attention_by_random_shares_equals_one_process(groups: Groups, degrees: tuple[int, int]) -> None:
    start = zlib.crc32(repr(degrees).encode()) % 10_000
    ring, ulysses = degrees
    answers = groups(ring * ulysses).run(
        f"{CASES}:attention_errors", ring=ring, ulysses=ulysses, seeds=list(range(start, start + 21))
    )
    worst = max((error, what, rank) for rank, errors in enumerate(answers) for what, error in errors.items())
    assert worst[0] <= BAR, worst


@pytest.mark.sweep(one_in=9)
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_transformer_by_random_shares_equals_itself_alone(
    groups: Groups, name: str, degrees: tuple[int, int]
) -> None:
    ring, ulysses = degrees
    seed = zlib.crc32(f"{name}{degrees}".encode())
    call: dict[str, Any] = {"ring": ring, "ulysses": ulysses, "seed": seed, "call": CALLS[name]}
    assert max(groups(ring * ulysses).run(f"{CASES}:transformer_error", **call)) <= BAR
