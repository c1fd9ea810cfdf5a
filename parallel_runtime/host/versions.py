"""What machines must have in common to compute together."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import sys

import torch
import torch.distributed

from .torchrun import PACKAGE


@functools.cache
def versions() -> tuple[str, ...]:
    """This machine's, each with its name.

    The release of PyTorch and not its build, which pip names or not for one and the same: what builds differ in is
    NCCL. It comes last, and only where there is one.
    """
    nccl = torch.distributed.is_nccl_available()
    return (
        f"CP Sampler {_digest()}",
        f"Python {sys.version_info.major}.{sys.version_info.minor}",
        f"PyTorch {torch.__version__.partition('+')[0]}",
        f"diffusers {importlib.metadata.version('diffusers')}",
        *([f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"] if nccl else []),
    )


def difference(theirs: tuple[str, ...]) -> str:
    """What is not the same there, in words; "" where all is. What only one machine has is not compared."""
    pairs = zip(theirs, versions(), strict=False)
    found = [f"it has {other}, this machine {ours}" for other, ours in pairs if other != ours]
    return "; ".join(found) + "; install the same on both" if found else ""


def _digest() -> str:
    """Of this package's code."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + path.read_bytes())
    return digest.hexdigest()[:8]
