"""How much of the work each worker gets: what `shares` of a CP Parallel Config say, and how it is told."""

from __future__ import annotations

import re

from ..errors import Refused
from ..specs import Division, Parallelism
from .sentences import say

NUMBERS = re.compile(r"\s*\d{1,9}(\s*,\s*\d{1,9})*\s*", re.ASCII)


def asked_for(shares: str, workers: int) -> tuple[int, ...]:
    """Of each of so many workers, in rank order; none where the host is to find out. Raises Refused."""
    if shares.strip() in ("", "auto"):
        return ()
    if shares.strip() == "equal":
        return (1,) * workers
    if not NUMBERS.fullmatch(shares):
        raise Refused(f"shares is auto, equal, or a whole number for each worker such as 3,2, and not {shares[:40]!r}")
    numbers = _numbers(shares)
    if len(numbers) != workers:
        raise Refused(
            f"shares {shares.strip()} names {len(numbers)}, and the number of workers is {workers}: name {workers}, "
            "one for each in the order of devices, or choose auto"
        )
    return numbers


def are_uneven(shares: str) -> bool:
    """Are they typed as numbers that are not all the same?"""
    return bool(NUMBERS.fullmatch(shares)) and len(set(_numbers(shares))) > 1


def _numbers(shares: str) -> tuple[int, ...]:
    return tuple(int(number) for number in shares.split(","))


def are_unused(degrees: Parallelism) -> bool:
    """Do they differ only between the halves of cfg_degree, which have a prompt each whatever is asked for?"""
    alike = all(len(set(lane)) == 1 for lane in degrees.lanes)
    return len(set(degrees.shares)) > 1 and alike and len(set(_of_rows(degrees))) == 1


def percent_of(division: Division) -> list[tuple[str, int]]:
    """Each worker's device, and its share of all the work in percent."""
    devices = division.placement.devices * division.placement.nnodes
    parts = of_all(division.degrees)
    return [(device, round(100 * part)) for device, part in zip(devices, parts, strict=True)]


def of_all(degrees: Parallelism) -> list[float]:
    """What each worker has to do of all the work. Lanes of prompts have as much to do whatever their shares, lanes of
    rows in proportion to theirs."""
    rows = _of_rows(degrees)
    return [
        share / sum(lane) / degrees.cfg_degree * rows[number // degrees.cfg_degree] / sum(rows)
        for number, lane in enumerate(degrees.lanes)
        for share in lane
    ]


def _of_rows(degrees: Parallelism) -> list[int]:
    """The shares of all workers together that have the same rows of the batch."""
    sums, each = [sum(lane) for lane in degrees.lanes], degrees.cfg_degree
    return [sum(sums[first : first + each]) for first in range(0, len(sums), each)]


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
