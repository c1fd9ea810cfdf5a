"""What tells files, models and code apart: fingerprints are the same text in each process that has the same."""

from __future__ import annotations

import hashlib
import os
from types import CodeType

import torch
from torch import Tensor, nn

from ..errors import Refused
from ..specs import SourceFile

SAMPLES = 64  # pieces of a file
VALUES = 32  # of a weight; a small one is sampled whole
WHOLE = 1024  # values
PIECE_BYTES = 64 << 10
# What does not show in its modules.
BUILT_BY = ("config", "latent_format", "timestep_conditioning", "decode_noise_scale", "decode_timestep")


def fingerprint(*parts: str | bytes | Tensor) -> str:
    """Fingerprints texts and the values of tensors, one after another, on any device and with any strides."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            digest.update(part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()


def model_fingerprint(model: nn.Module, dtype: torch.dtype) -> str:
    """Fingerprints a model by its structure and samples of every weight, rounded to `dtype`. Weights may be on several
    devices."""
    built = repr([getattr(model, name, None) for name in BUILT_BY])
    # By name: with dynamic VRAM a Linear of ComfyUI's has weight and bias in the order in which the file holds them.
    weights = (tensor for _, tensor in sorted(model.state_dict().items()) if tensor.is_floating_point())
    return fingerprint(str(model), built, *(sample(tensor).to(dtype) for tensor in weights))


def stat_file(path: str) -> SourceFile:
    """Returns the path, and the file's size and time of change at this moment. Raises FileNotFoundError."""
    stat = os.stat(path)
    return SourceFile(path=path, size=stat.st_size, mtime_ns=stat.st_mtime_ns)


def check_unchanged(file: SourceFile) -> None:
    """Raises Refused for a file that is gone, or has changed since it was described."""
    try:
        now = stat_file(file.path)
    except FileNotFoundError:
        raise Refused("file.gone", path=file.path) from None
    if now != file:
        raise Refused("file.changed", path=file.path)


def file_fingerprint(path: str) -> str:
    """Fingerprints a file by its size, its start and pieces from all over it. Raises OSError."""
    size, pieces = os.path.getsize(path), []
    with open(path, "rb") as file:
        for index in range(SAMPLES):
            file.seek(index * size // SAMPLES)
            pieces.append(file.read(PIECE_BYTES))
    return fingerprint(str(size), *pieces)


def code_fingerprint(code: CodeType) -> str:
    """Fingerprints the behaviour of a function, functions inside it included, but not its place in a file. Equal in
    each Python of one version."""
    names = repr((code.co_names, code.co_varnames, code.co_cellvars, code.co_freevars))
    constants = (
        code_fingerprint(constant) if isinstance(constant, CodeType) else repr(constant)
        for constant in code.co_consts
        if not isinstance(constant, frozenset)  # whose order is another in each process
    )
    return fingerprint(code.co_code, names, *constants)[:16]


def sample(weight: Tensor) -> Tensor:
    """Returns values from all over a weight, of any strides: of a matrix all columns of one row, and others that lie in
    other rows and other columns each."""
    size = weight.numel()
    count = size if size <= WHOLE else VALUES
    columns = size // len(weight) if size and weight.ndim > 1 else 0
    step = max(1, size // max(1, count) - columns // VALUES - (columns > 0))
    row = columns * (len(weight) // 2) if count < size and columns else 0
    weight = weight.contiguous()
    over = weight.as_strided((count,), (step,))
    return torch.cat([over, weight.as_strided((columns,), (1,), weight.storage_offset() + row)]) if row else over


def stored_samples(weight: Tensor, dtype: torch.dtype | None) -> list[Tensor]:
    """Returns samples of the tensors that a weight of any class is stored in; of a plain one rounded to `dtype`."""
    with torch._C.DisableTorchFunctionSubclass():
        if hasattr(weight, "__tensor_flatten__"):
            inner = (getattr(weight, name) for name in weight.__tensor_flatten__()[0])
            return [each for part in inner for each in stored_samples(part, None)]
        values = sample(weight.detach().as_subclass(Tensor))
        return [values.to(dtype) if dtype is not None and values.is_floating_point() else values]
