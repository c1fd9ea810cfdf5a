"""Values with tensors in them, between processes: safetensors bytes in anonymous shared memory.

The format already holds names, shapes and dtypes, the kernel already shares the pages, and a file without a name
cannot be left behind. What is not a tensor rides in the header's metadata as JSON. Knows nothing of who reads it."""

import fcntl
import json
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ProtocolError, Refused
from ..jobs import Described

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
LIMIT = 16 << 30
SEALS = 0x1 | 0x2 | 0x4 | 0x8  # F_SEAL_SEAL, SHRINK, GROW, WRITE: a reader's pages can neither vanish nor change


@contextmanager
def bundled(value: Any) -> Iterator[int]:
    """Yields the memory file of `write_bundle`, and closes it at the end."""
    bundle = write_bundle(value)
    try:
        yield bundle
    finally:
        os.close(bundle)


def write_bundle(value: Any) -> int:
    """Copies `value` (dicts, lists, tuples, plain values, tensors of any device, Described) into a new memory file.

    Returns its file descriptor, which the caller closes. Raises Refused, naming the place, for any other object and
    for more than LIMIT bytes; OSError (ENOSPC) where the memory is not there."""
    tensors: dict[str, Tensor] = {}
    tree = _fold(value, "value", tensors, {})
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))  # keeps every view aligned
    entries: dict[str, Any] = {"__metadata__": {"tree": json.dumps(tree)}}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end]}
        position = end
    body = json.dumps(entries).encode()
    body += b" " * (-(len(body) + 8) % 64)  # the tensors begin aligned
    start = 8 + len(body)
    if start + position > LIMIT:
        raise too_large(start + position)
    fd = empty_bundle(start + position)
    try:
        with mmap.mmap(fd, start + position) as memory:
            memory[:start] = len(body).to_bytes(8, "little") + body
            for name, tensor in tensors.items():
                _copy(tensor, memory, start + entries[name]["data_offsets"][0])
        if hasattr(fcntl, "F_ADD_SEALS"):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def too_large(size: int) -> Refused:
    return Refused("payload.size", size=f"{size / 2**30:.1f}", limit=f"{LIMIT / 2**30:.1f}")


def empty_bundle(size: int) -> int:
    """Returns a memory file of `size` bytes. Raises OSError (ENOSPC) where the memory is not there."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("cp-bundle", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.posix_fallocate(fd, 0, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_bundle(fd: int) -> Any:
    """Returns the value that was written. Its tensors are private views of the shared pages: no copy until written to.

    Closes `fd`. Raises ProtocolError if the bytes are no bundle."""
    try:
        with safe_open(f"/proc/self/fd/{fd}", "pt") as bundle:
            tensors = {name: bundle.get_tensor(name) for name in bundle.keys()}  # noqa: SIM118 - not a dict
            tree = json.loads((bundle.metadata() or {})["tree"])
        return _unfold(tree, tensors)
    except (SafetensorError, KeyError, TypeError, ValueError, OSError, RecursionError) as error:
        raise ProtocolError(f"not a bundle: {error!r}") from error
    finally:
        os.close(fd)


def _copy(tensor: Tensor, memory: mmap.mmap, offset: int) -> None:
    if not tensor.numel():
        return
    bytes_ = torch.frombuffer(memory, dtype=torch.uint8, count=tensor.numel() * tensor.element_size(), offset=offset)
    flat = tensor.detach().contiguous().flatten()
    bytes_.copy_(flat.as_strided(flat.shape, (1,)).view(torch.uint8))  # the stride of a single number may be any


def check_tensor(value: Tensor, where: str) -> None:
    """Raises Refused for a tensor that no bundle can have."""
    if value.dtype not in DTYPES or value.layout is not torch.strided or value.is_nested:
        raise Refused("payload.tensor", where=where, dtype=str(value.dtype), layout=str(value.layout))


def _fold(value: Any, where: str, tensors: dict[str, Tensor], seen: dict[int, str]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Described):
        tensors |= value.tensors
        return {"described": [value.tree, list(value.tensors)]}
    if isinstance(value, Tensor):
        check_tensor(value, where)
        name = seen.setdefault(id(value), str(len(seen)))
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, list | tuple):
        items = [_fold(item, f"{where}[{index}]", tensors, seen) for index, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str | int | float):
                raise Refused("payload.key", where=where, kind=type(key).__name__)
        return {"dict": [[key, _fold(item, f"{where}.{key}", tensors, seen)] for key, item in value.items()]}
    raise Refused("payload.object", where=where, module=type(value).__module__, name=type(value).__name__)


def _unfold(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    match kind:
        case "tensor":
            return tensors[content]
        case "described":
            described, names = content
            return Described(described, {name: tensors[name] for name in names})
        case "list":
            return [_unfold(item, tensors) for item in content]
        case "tuple":
            return tuple(_unfold(item, tensors) for item in content)
        case "dict":
            return {key: _unfold(item, tensors) for key, item in content}
    raise ValueError(f"unknown node {kind!r}")
