"""Broadcasts from rank 0 over gloo: the payload of a job, and checks that all machines have the same model files."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...engine.comm.ranks import machine, machine_count, rank
from ...engine.comm.votes import differing_ranks
from ...errors import Refused
from ...loading.fingerprint import check_unchanged, file_fingerprint
from ...specs import SourceFile
from ...wire.bundles import empty_bundle

PIECE_BYTES = 256 << 20


def payload(bundle: int | None) -> int:
    """Returns the file descriptor of a request's bundle. With several machines the host sends it to rank 0 alone, and
    the others get a copy. Collective then."""
    if machine_count() == 1:
        assert bundle is not None
        return bundle
    size = torch.tensor(os.fstat(bundle).st_size if bundle is not None else 0)
    dist.broadcast(size, src=0)
    fd = empty_bundle(int(size)) if bundle is None else bundle
    is_copy = bundle is None  # rank 0's is sealed against writing
    memory: Tensor = torch.from_file(f"/proc/self/fd/{fd}", shared=is_copy, size=int(size), dtype=torch.uint8)
    for piece in memory.split(PIECE_BYTES):
        dist.broadcast(piece, src=0)
    return fd


def check_files(files: Sequence[SourceFile]) -> None:
    """Raises Refused for the first file that has changed since it was described, or, on another machine than
    ComfyUI's, is missing or another file than there. Collective where there are several machines.

    Machines compare samples of the weights: files of one architecture may have equal names and sizes. Times may differ.
    """
    # All of them before a refusal.
    differing = [differing_ranks(_fingerprint(file.path)) if machine_count() > 1 else [] for file in files]
    for file, other_ranks in zip(files, differing, strict=True):
        if machine_count() > 1 and not os.path.isfile(file.path):
            raise Refused("file.missing", path=file.path)
        if rank() in other_ranks:
            raise Refused("file.other", path=file.path)
        if machine() == 0:
            check_unchanged(file)


def _fingerprint(path: str) -> str:
    return file_fingerprint(path) if os.path.isfile(path) else ""
