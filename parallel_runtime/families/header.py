"""The header of a safetensors file: names, shapes and number formats, checked, without reading a weight.

Needs nothing outside the standard library. Knows no model.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import Refused

PREFIX = "model.diffusion_model."  # where ComfyUI's files keep the transformer, beside VAE and text encoders
BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
LONGEST = 100_000_000  # safetensors' own limit for a header
OTHER_FILE = "take the model's safetensors file in bfloat16, float16 or float32"
AGAIN = "download or copy it again"


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a file says of its transformer.

    `shapes` and `dtypes` go by the parameter's name without `prefix`, in the order of the file; dtypes are
    safetensors' words ("BF16"). `bytes` is the size of those tensors together.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    prefix: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(math.prod(shape) * BYTES[self.dtypes[name]] for name, shape in self.shapes.items())


def header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header of the file at `path`.

    Where names begin with `model.diffusion_model.`, only those count. Raises Refused for a file that is not
    safetensors, is cut short, or whose header does not add up.
    """
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = _length(file.read(8), size, path)
        entries = _parse(file.read(length), path)
    metadata = _metadata(entries.pop("__metadata__", None), path)
    ordered = sorted(entries.items(), key=lambda entry: _offsets(entry, path))
    _check(ordered, size - 8 - length, path)
    prefix = PREFIX if any(name.startswith(PREFIX) for name in entries) else ""
    ours = {name.removeprefix(prefix): entry for name, entry in ordered if name.startswith(prefix)}
    return Header(
        shapes={name: tuple(entry["shape"]) for name, entry in ours.items()},
        dtypes={name: entry["dtype"] for name, entry in ours.items()},
        prefix=prefix,
        metadata=metadata,
    )


def _length(first: bytes, size: int, path: Any) -> int:
    if first[:4] == b"GGUF":
        raise Refused(f"{path} is a GGUF file, which the workers cannot read; {OTHER_FILE}")
    length = struct.unpack("<Q", first)[0] if len(first) == 8 else LONGEST + 1
    if length > LONGEST:
        raise Refused(f"{path} is not a safetensors file: it does not begin with the length of a header; {OTHER_FILE}")
    if length > size - 8:
        raise Refused(f"{path} is cut short: its header takes {length} bytes, the file has {size}; {AGAIN}")
    return length


def _parse(text: bytes, path: Any) -> dict[str, Any]:
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Refused(f"{path} is not a safetensors file: its header is no JSON ({error}); {OTHER_FILE}") from error
    if not isinstance(entries, dict):
        raise Refused(f"{path} is not a safetensors file: its header is no JSON object; {OTHER_FILE}")
    return entries


def _metadata(said: Any, path: Any) -> dict[str, str]:
    said = {} if said is None else said
    if not isinstance(said, dict) or not all(isinstance(value, str) for value in said.values()):
        raise Refused(f"{path}: the header's metadata is not made of texts: {str(said)[:200]}; {AGAIN}")
    return said


def _offsets(entry: tuple[str, Any], path: Any) -> tuple[int, int]:
    name, said = entry
    try:
        begin, end = said["data_offsets"]
        whole = all(isinstance(n, int) and n >= 0 for n in (begin, end, *said["shape"])) and said["dtype"] in BYTES
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole:
        raise Refused(f"{path}: the header's entry for {name} makes no sense: {str(said)[:200]}; {AGAIN}")
    return begin, end


def _check(ordered: list[tuple[str, Any]], available: int, path: Any) -> None:
    position = 0
    for name, said in ordered:
        begin, end = said["data_offsets"]
        wanted = math.prod(said["shape"]) * BYTES[said["dtype"]]
        if begin != position or end - begin != wanted:
            place = f"bytes {begin} to {end} for {said['dtype']} {said['shape']}"
            raise Refused(f"{path}: the header lies about {name}: {place}; {AGAIN}")
        position = end
    if position > available:
        raise Refused(f"{path} is cut short: its tensors take {position} bytes, the file has {available}; {AGAIN}")
    if position < available:
        raise Refused(f"{path} has {available - position} bytes that its header does not explain; {AGAIN}")
