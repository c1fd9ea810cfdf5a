"""Gathers ints of every rank on the CPU, and takes the decisions that all ranks have to take together.

A rank that leaves the loop, or skips blocks, alone leaves the others waiting in a collective forever. So no rank may
act on what only it has seen (a message, a threshold, a failure) before it has asked here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import Refused
from ...loading.fingerprint import fingerprint
from .collectives import all_gather_into
from .mesh import GroupState, MeshDim
from .ranks import world_size

FINGERPRINT_DIGITS = 15  # in base 16: what fits into an int64


def all_gather_ints(numbers: Sequence[int], dim: MeshDim | None = None) -> list[list[int]]:
    """Returns the `numbers` of each rank of `dim` in order: equally many ints of 63 bits. Collective over `dim`, or
    over the whole group where it is None. In a test group that delivers nothing all numbers are this rank's."""
    size = world_size() if dim is None else dim.size
    if size == 1:
        return [list(numbers)]
    index, ranks = (dist.get_rank(), tuple(range(size))) if dim is None else (dim.index, dim.ranks)
    # Where tensors are on GPUs these waits of the CPU must not count as waits of the device.
    timed = dim is not None and dim.group_state.waited_seconds is not None
    cpu_dim = MeshDim(
        size=size, index=index, ranks=ranks, group_state=dim.group_state if dim and timed else GroupState()
    )
    local = torch.tensor([numbers], dtype=torch.int64)
    (by_rank,) = all_gather_into(local.repeat(size, 1), local, [1] * size, cpu_dim).wait()
    values: list[list[int]] = by_rank.tolist()
    return values


def all_gather_int(number: int, dim: MeshDim | None = None) -> list[int]:
    """Returns the `number` of each rank, in rank order. Collective as `all_gather_ints`."""
    return [value for (value,) in all_gather_ints([number], dim)]


def any_rank(flag: bool, dim: MeshDim | None = None) -> bool:
    """Returns true on every rank when it is true on any. Collective as `all_gather_ints`."""
    return any(all_gather_int(int(flag), dim))


def differing_ranks(*parts: str | bytes | Tensor, dim: MeshDim | None = None) -> list[int]:
    """Returns the ranks whose texts or tensors differ from the first one's in any bit. Collective as
    `all_gather_ints`."""
    digests = all_gather_int(int(fingerprint(*parts)[:FINGERPRINT_DIGITS], 16), dim)
    return [rank for rank, digest in enumerate(digests) if digest != digests[0]]


@contextmanager
def refuse_on_all_ranks(dim: MeshDim | None = None) -> Iterator[None]:
    """If one rank of `dim` raises Refused in this context, all do on leaving, so that none is waited for later.
    Every rank has to enter it, and no collective may follow a refusal within it. Collective as `all_gather_ints`."""
    refused: Refused | None = None
    try:
        yield
    except Refused as error:
        refused = error
    if any_rank(refused is not None, dim):
        raise refused or Refused()
