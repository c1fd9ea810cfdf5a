"""Cases that ranks run with random shares: attentions of every kind, and whole transformers."""

from __future__ import annotations

import random
from typing import Any

from .cases import chunked_errors, random_errors
from .model_cases import forward_error
from .side_cases import cross_errors, pair_errors, replica_errors

KINDS = ("plain", "collected", "grouped", "chunks", "cross", "replica", "pairs")


def random_shares(choose: random.Random, world: int) -> tuple[int, ...]:
    """Some nearly alike, some far apart, some 0."""
    most = choose.choice((2, 5, 64))
    shares = [choose.choice((0, 1, most, choose.randint(1, most))) for _ in range(world)]
    shares[choose.randrange(world)] = most
    return tuple(shares)


def attention_errors(rank: int, world: int, ring: int, ulysses: int, seeds: list[int]) -> dict[str, float]:
    """The error of each seed's attention, by what it was."""
    errors = {}
    for seed in seeds:
        choose = random.Random(seed)
        shares, kind = random_shares(choose, world), KINDS[seed % len(KINDS)]
        errors[f"{seed}: {kind} by {shares}"] = max(_attention(kind, world, rank, [ring, ulysses, 1, shares], seed))
    return errors


def _attention(kind: str, world: int, rank: int, degrees: list[Any], seed: int) -> list[float]:
    if kind == "cross":
        return cross_errors(rank, world, degrees, [seed], [[], ["audio"], ["text"]][seed % 3])
    if kind == "replica":
        return replica_errors(rank, world, degrees, [seed], [["text"], ["image"]][seed % 2])
    if kind == "pairs":
        return pair_errors(rank, world, degrees, [seed], "alltoall")
    if kind == "chunks":
        return chunked_errors(rank, world, degrees, [seed], grouped=bool(seed % 2))
    options = {"rotate_method": "allgather"} if kind == "collected" else {}
    return random_errors(rank, world, degrees, [seed], options, grouped=kind == "grouped")


def transformer_error(rank: int, world: int, ring: int, ulysses: int, seed: int, call: dict[str, Any]) -> float:
    """Of a transformer, by shares of this seed."""
    shares = random_shares(random.Random(seed), world)
    return forward_error(rank, world, degrees=[ring, ulysses, 1, shares], **call)
