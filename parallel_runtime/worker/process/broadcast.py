"""Broadcasts from rank 0 over gloo: the payload of a job, and checks that all machines have the same model files."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from ...engine.comm.ranks import machine, machine_count, rank
from ...engine.comm.votes import differing_ranks
from ...errors import Refused
from ...loading.fingerprint import file_fingerprint
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
    access = mmap.MAP_SHARED if bundle is None else mmap.MAP_PRIVATE  # rank 0's is sealed against writing
    with mmap.mmap(fd, int(size), access) as memory:
        _broadcast(memory)
    return fd


def check_files(files: Iterable[SourceFile]) -> None:
    """Raises Refused for the first file that has changed, after checking all of them: the checks are collective."""
    refused: list[Refused] = []
    for file in files:
        try:
            _check(file)
        except Refused as error:
            refused.append(error)
    if refused:
        raise refused[0]


def _check(file: SourceFile) -> None:
    """Collective where there are several machines."""
    if machine_count() > 1:
        _check_same(file.path)
    if machine() == 0:
        _check_unchanged(file)


def _check_unchanged(file: SourceFile) -> None:
    try:
        stat = os.stat(file.path)
    except FileNotFoundError:
        raise Refused("file.gone", path=file.path) from None
    if (stat.st_size, stat.st_mtime_ns) != (file.size, file.mtime_ns):
        raise Refused("file.changed", path=file.path)


def _check_same(path: str) -> None:
    """Raises Refused where `path` is missing on this machine, or is another file than on rank 0's.

    It compares samples of the weights: files of one architecture may have equal names and sizes. Times may differ.
    """
    exists = os.path.isfile(path)
    differing = differing_ranks(file_fingerprint(path) if exists else "")
    if not exists:
        raise Refused("file.missing", path=path)
    if rank() in differing:
        raise Refused("file.other", path=path)


def _broadcast(memory: mmap.mmap) -> None:
    full: Tensor = torch.frombuffer(memory, dtype=torch.uint8)
    for piece in full.split(PIECE_BYTES):
        dist.broadcast(piece, src=0)
