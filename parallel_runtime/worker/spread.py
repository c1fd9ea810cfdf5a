"""What only rank 0 has, on every rank: the payload of a job, and which file a model is. Collective, over gloo."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import Refused
from ..specs import SourceFile
from ..wire.bundles import empty_bundle
from .ranks import apart, machine, machines, rank

PIECE_BYTES = 256 << 20
SAMPLES = 64
SAMPLE_BYTES = 64 << 10


def payload(bundle: int | None) -> int:
    """The bundle that came with a request; where there are several machines it came to rank 0 alone."""
    if machines() == 1:
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
    """Raises Refused for the first that is not what it was; looks at all of them, since others may wait for that."""
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
    if machines() > 1:
        _check_same(file.path)
    if machine() == 0:
        _check_unchanged(file)


def _check_unchanged(file: SourceFile) -> None:
    try:
        stat = os.stat(file.path)
    except FileNotFoundError:
        raise Refused(f"{file.path} is gone since it was loaded in the graph; run the loader node again") from None
    if (stat.st_size, stat.st_mtime_ns) != (file.size, file.mtime_ns):
        raise Refused(f"{file.path} changed on disk after it was loaded in the graph; run the loader node again")


def _check_same(path: str) -> None:
    """Raises Refused where `path` is missing on this machine, or is another file than on rank 0's.

    Files of one architecture differ in neither names nor size: samples of the weights are compared. Times may differ.
    """
    there = os.path.isfile(path)
    others = apart(_fingerprint(path) if there else b"")
    if not there:
        raise Refused(f"there is no file {path} on this machine; every machine needs the model at the same path")
    if rank() in others:
        raise Refused(f"{path} is another file on this machine than on the machine of ComfyUI; copy it from there")


def _broadcast(memory: mmap.mmap) -> None:
    whole: Tensor = torch.frombuffer(memory, dtype=torch.uint8)
    for piece in whole.split(PIECE_BYTES):
        dist.broadcast(piece, src=0)


def _fingerprint(path: str) -> bytes:
    """Of the size, the start and samples from everywhere."""
    size = os.path.getsize(path)
    digest = hashlib.sha256(str(size).encode())
    with open(path, "rb") as file:
        for index in range(SAMPLES):
            file.seek(index * size // SAMPLES)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()
