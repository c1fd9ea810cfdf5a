"""Shares of the work for each worker: those of a CP Parallel Config, and whole numbers in proportion to
measurements."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from ..errors import Refused, quoted
from ..specs import Parallelism, Placement

PARTS = 64  # for each worker
DIGITS = 9  # of one, at most


def requested_shares(shares: str, workers: int, devices: int = 0, nnodes: int = 1) -> tuple[int, ...]:
    """Returns the share of each of this many workers, in rank order; () where `shares` leaves them to auto. Numbers may
    be one for each of a config's `devices` on each machine, of which workers have the first. Raises Refused."""
    if are_automatic(shares):
        return ()
    if shares.strip() == "equal":
        return (1,) * workers
    numbers, every, local = _numbers(shares), devices * nnodes, workers // nnodes
    if not numbers:
        raise Refused("shares.text", "shares", {"shares": "auto"}, shares=quoted(shares))
    if len(numbers) == workers:
        return numbers
    if len(numbers) != every or local > devices:
        text = quoted(shares.strip())
        raise Refused("shares.count", "shares", {"shares": "auto"}, shares=text, count=len(numbers), workers=workers)
    return tuple(number for machine in range(nnodes) for number in numbers[machine * devices :][:local])


def are_automatic(shares: str) -> bool:
    """Are these shares left to auto?"""
    return shares.strip() in ("", "auto")


def are_uneven(shares: str) -> bool:
    """Are these shares numbers that are not all equal?"""
    return len(set(_numbers(shares))) > 1


def _numbers(shares: str) -> tuple[int, ...]:
    """Returns the comma-separated whole numbers; () for other text."""
    words = [word.strip() for word in shares.split(",")]
    known = all(word.isascii() and word.isdecimal() and len(word) <= DIGITS for word in words)
    return tuple(map(int, words)) if known else ()


def shares_have_no_effect(degrees: Parallelism) -> bool:
    """Do the shares differ only between the groups of cfg_degree, which have a prompt each whatever their shares?"""
    even = all(len(set(shares)) == 1 for shares in degrees.cp_group_shares)
    return len(set(degrees.shares)) > 1 and even and len(set(degrees.data_group_shares)) == 1


def in_proportion(to: Sequence[float]) -> tuple[int, ...]:
    """Returns whole numbers in proportion to these, about PARTS for each worker; a positive number stays positive."""
    mean = sum(to) / len(to)
    sizes = [max(round(PARTS * one / mean), int(one > 0)) for one in to]
    common = gcd(*sizes)
    return tuple(size // common for size in sizes)


def shares_within(total: int, budget_bytes: Sequence[int | None]) -> tuple[int, ...]:
    """Returns shares of what takes `total` bytes on all workers together: equal, but none above its budget (None: no
    limit); where all budgets are too small, in proportion to them. () where all are equal."""
    limits = sorted(total if budget is None else max(0, budget) for budget in budget_bytes)
    remaining, level = total, 0.0
    for number, limit in enumerate(limits):
        level = remaining / (len(limits) - number)
        if limit >= level:
            break
        remaining -= limit
    if limits[0] >= level or not limits[-1]:
        return ()
    return in_proportion([level if budget is None else min(max(0, budget), level) for budget in budget_bytes])


def work_percent(degrees: Parallelism, placement: Placement) -> list[tuple[str, int]]:
    """Returns each worker's device with its share of all the work in percent."""
    devices = placement.devices * placement.nnodes
    return [(device, round(100 * part)) for device, part in zip(devices, work_fractions(degrees), strict=True)]


def work_fractions(degrees: Parallelism) -> list[float]:
    """Returns each worker's fraction of all the work. Ranks of different prompts have equal parts whatever their
    shares, ranks of different images have parts in proportion to them."""
    groups = degrees.data_group_shares
    return [
        share / sum(shares) / degrees.cfg_degree * groups[number // degrees.cfg_degree % len(groups)] / sum(groups)
        for number, shares in enumerate(degrees.cp_group_shares)
        for share in shares
    ]
