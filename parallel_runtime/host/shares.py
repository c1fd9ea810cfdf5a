"""How much of the work each worker gets: what `shares` of a CP Parallel Config say, and how it is told."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import Refused
from ..specs import Division, Parallelism

NUMBERS = re.compile(r"\s*\d{1,9}(\s*,\s*\d{1,9})*\s*", re.ASCII)


def asked_for(shares: str, workers: int) -> tuple[int, ...]:
    """Of each of so many workers, in rank order; none where the host is to find out. Raises Refused."""
    if shares.strip() in ("", "auto"):
        return ()
    if shares.strip() == "equal":
        return (1,) * workers
    if not NUMBERS.fullmatch(shares):
        raise Refused(f"shares is auto, equal, or a whole number for each worker such as 3,2, and not {shares[:40]!r}")
    numbers = tuple(int(number) for number in shares.split(","))
    if len(numbers) != workers:
        raise Refused(
            f"shares {shares.strip()} names {len(numbers)}, and the number of workers is {workers}: name {workers}, "
            "one for each in the order of devices, or choose auto"
        )
    return numbers


def are_uneven(shares: str) -> bool:
    """Are they typed as numbers that are not all the same?"""
    return bool(NUMBERS.fullmatch(shares)) and len({int(number) for number in shares.split(",")}) > 1


def are_unused(degrees: Parallelism) -> bool:
    """Do they differ only between the halves of cfg_degree, which have a prompt each whatever is asked for?"""
    shares, each = degrees.shares, degrees.context_parallel_size
    lanes = _sums(shares, each)
    alike = all(len(set(shares[first : first + each])) == 1 for first in range(0, len(shares), each))
    return len(set(shares)) > 1 and alike and len(set(_sums(lanes, degrees.cfg_degree))) == 1


def percent_of(division: Division) -> list[tuple[str, int]]:
    """Each worker's device, and its share of all the work in percent: each half of cfg_degree has one prompt."""
    devices, degrees = division.placement.devices * division.placement.nnodes, division.degrees
    shares, each = degrees.shares or (1,) * len(devices), degrees.context_parallel_size
    lanes = _sums(shares, each)
    groups = _sums(lanes, degrees.cfg_degree)
    parts = [
        share / lanes[rank // each] / degrees.cfg_degree * groups[rank // each // degrees.cfg_degree] / sum(groups)
        for rank, share in enumerate(shares)
    ]
    return [(device, round(100 * part)) for device, part in zip(devices, parts, strict=True)]


def _sums(shares: Sequence[int], each: int) -> list[int]:
    """Of each so many that follow each other."""
    return [sum(shares[first : first + each]) for first in range(0, len(shares), each)]


def in_words(division: Division) -> str:
    """For CP Plan; "" where all have alike."""
    shares = division.degrees.shares
    if len(set(shares)) < 2:
        return ""
    told = ", ".join(f"{device} {share} %" for device, share in percent_of(division))
    return f"{told}: tokens in proportion, heads as far as whole heads go."


def idle(division: Division) -> str:
    """What to do about workers without work; "" where there are none."""
    if 0 not in division.degrees.shares:
        return ""
    devices, nnodes = division.placement.devices, division.placement.nnodes
    without = [device for device, share in zip(devices * nnodes, division.degrees.shares, strict=True) if not share]
    return (
        f"Nothing is left for {', '.join(without)}, which waits for the others all the same: leave it out of devices, "
        "and out of shares."
    )
