"""What machines must have in common to compute together."""

from __future__ import annotations

import functools
import hashlib
import sys

import torch

from .torchrun import PACKAGE


@functools.cache
def versions() -> tuple[str, ...]:
    """This machine's, each with its name. Of PyTorch also the build, which pip does not always tell."""
    return (
        f"CP Sampler {_digest()}",
        f"Python {sys.version_info.major}.{sys.version_info.minor}",
        f"PyTorch {torch.__version__}",
    )


def difference(theirs: tuple[str, ...]) -> str:
    """What is not the same there, in words; "" where all is."""
    pairs = zip(theirs, versions(), strict=False)
    found = [f"it has {other}, this machine {ours}" for other, ours in pairs if other != ours]
    return "; ".join(found) + "; install the same on both" if found else ""


def _digest() -> str:
    """Of this package's code."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(str(path.relative_to(PACKAGE)).encode() + path.read_bytes())
    return digest.hexdigest()[:8]
