"""What a group says to its ranks, and what goes along: a job's bundle, memory for its result."""

from __future__ import annotations

import os
from typing import Any

from ..specs import Placement
from ..wire.messages import Room
from .launch import Processes


def ask(processes: Processes, placement: Placement, message: Any, bundle: int | None = None) -> None:
    """Every rank. `bundle` goes to those of this machine; where there are several, to rank 0, which passes it on.
    Raises WorkerDied."""
    for rank in range(len(processes.channels)):
        copy = None
        if bundle is not None and (rank == 0 or placement.nnodes == 1):
            copy = os.dup(bundle)
        _send(processes, rank, message, copy)


def make_room(processes: Processes, placement: Placement, job: int, room: int) -> None:
    """For the ranks of this machine; others have no memory in common with it. Raises WorkerDied."""
    for rank in range(len(placement.devices)):
        _send(processes, rank, Room(job), os.dup(room))


def _send(processes: Processes, rank: int, message: Any, bundle: int | None) -> None:
    try:
        processes.channels[rank].send(message, bundle)
    except OSError:
        raise processes.died(rank) from None
