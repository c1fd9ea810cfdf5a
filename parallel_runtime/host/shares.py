"""How much of the work each worker gets: what `shares` of a CP Parallel Config say, and how it is told."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import gcd

from ..errors import Refused
from ..specs import Division, Parallelism, ParallelRequest
from .sentences import say

PARTS = 64  # for each worker
NUMBERS = re.compile(r"\s*\d{1,9}(\s*,\s*\d{1,9})*\s*", re.ASCII)


def asked_for(shares: str, workers: int, devices: int = 0, nnodes: int = 1) -> tuple[int, ...]:
    """Of each of so many workers, in rank order; none where the host is to find out. Of a config's `devices` on each
    machine workers have the first, and numbers may be of all of them. Raises Refused."""
    if shares.strip() in ("", "auto"):
        return ()
    if shares.strip() == "equal":
        return (1,) * workers
    if not NUMBERS.fullmatch(shares):
        raise Refused(f"shares is auto, equal, or a whole number for each worker such as 3,2, and not {shares[:40]!r}")
    numbers, every, here = _numbers(shares), devices * nnodes, workers // nnodes
    if len(numbers) == workers:
        return numbers
    if len(numbers) != every or here > devices:
        raise Refused(
            f"shares {shares.strip()} names {len(numbers)}, and the number of workers is {workers}: name {workers}, "
            "one for each in the order of devices, or choose auto"
        )
    return tuple(number for machine in range(nnodes) for number in numbers[machine * devices :][:here])


def are_uneven(shares: str) -> bool:
    """Are they typed as numbers that are not all the same?"""
    return bool(NUMBERS.fullmatch(shares)) and len(set(_numbers(shares))) > 1


def _numbers(shares: str) -> tuple[int, ...]:
    return tuple(int(number) for number in shares.split(","))


def are_unused(degrees: Parallelism) -> bool:
    """Do they differ only between the halves of cfg_degree, which have a prompt each whatever is asked for?"""
    alike = all(len(set(lane)) == 1 for lane in degrees.lanes)
    return len(set(degrees.shares)) > 1 and alike and len(set(degrees.rows)) == 1


def in_proportion(to: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in proportion to these, about PARTS for each worker; nobody who has any goes without."""
    mean = sum(to) / len(to)
    sizes = [max(round(PARTS * one / mean), int(one > 0)) for one in to]
    common = gcd(*sizes)
    return tuple(size // common for size in sizes)


def that_fit(total: int, rooms: Sequence[int | None]) -> tuple[int, ...]:
    """Shares of what takes so many bytes on all workers together: alike, but nobody has more than its room, None: any;
    where all have too little, by their rooms. None: all alike."""
    limits = sorted(total if room is None else max(0, room) for room in rooms)
    left, level = total, 0.0
    for number, limit in enumerate(limits):
        level = left / (len(limits) - number)
        if limit >= level:
            break
        left -= limit
    if limits[0] >= level or not limits[-1]:
        return ()
    return in_proportion([level if room is None else min(max(0, room), level) for room in rooms])


def unused(request: ParallelRequest, division: Division, network: str) -> str:
    """That numbers have nothing to divide in a network that only shares out prompts; "" where they have."""
    if division.degrees.shares or not are_uneven(request.shares) or division.placement.world_size == 1:
        return ""
    return say("note.unused", shares=request.shares.strip(), name=network)


def percent_of(division: Division) -> list[tuple[str, int]]:
    """Each worker's device, and its share of all the work in percent."""
    devices = division.placement.devices * division.placement.nnodes
    parts = of_all(division.degrees)
    return [(device, round(100 * part)) for device, part in zip(devices, parts, strict=True)]


def of_all(degrees: Parallelism) -> list[float]:
    """What each worker has to do of all the work. Lanes of prompts have as much to do whatever their shares, lanes of
    rows in proportion to theirs."""
    rows = degrees.rows
    return [
        share / sum(lane) / degrees.cfg_degree * rows[number // degrees.cfg_degree % len(rows)] / sum(rows)
        for number, lane in enumerate(degrees.lanes)
        for share in lane
    ]


def in_words(division: Division) -> str:
    """For CP Plan; "" where all have alike."""
    shares = division.degrees.shares
    if len(set(shares)) < 2:
        return ""
    told = ", ".join(f"{device} {share} %" for device, share in percent_of(division))
    return say("shares", shares=told)


def idle(division: Division) -> str:
    """What to do about workers without work; "" where there are none."""
    if 0 not in division.degrees.shares:
        return ""
    devices, nnodes = division.placement.devices, division.placement.nnodes
    without = [device for device, share in zip(devices * nnodes, division.degrees.shares, strict=True) if not share]
    return say("note.workless", devices=", ".join(without))
