"""A checkpoint file becomes a transformer on this rank's device. Fetches nothing; knows no model family by name."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from ..families import Family, recognise
from .weights import Weights

Patch = Callable[[str, Tensor], Tensor]
NAMED = 4  # parameters named in an error, of which there may be a thousand


@dataclass(frozen=True, kw_only=True)
class Loaded:
    family: Family
    transformer: Any


@torch.no_grad()
def load(
    path: str | os.PathLike[str],
    *,
    weight_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    device: torch.device | str = "cpu",
    hints: Mapping[str, Any] | None = None,
    on_share: Callable[[float], None] | None = None,
    patch: Patch | None = None,
) -> Loaded:
    """Read the transformer in the file at `path`.

    Weights are rounded to `weight_dtype`, then stored in `compute_dtype` on `device`; on the CPU in the file's own
    dtype they stay views of the mapped file. `hints` is ComfyUI's unet_config. `on_share` hears the share of bytes
    that has been read, 0 to 1. `patch(name, tensor)` may return other values for a checkpoint tensor, under the name
    that ComfyUI's diffusion model has for it. Raises ValueError for a file that no family knows, or that does not
    fill its family.
    """
    weights = Weights(path)
    family = recognise(weights.header.shapes, hints)
    with parameters_on_meta():
        transformer = getattr(diffusers, family.transformer)(**family.config())
    wanted = {name: tuple(slot.shape) for name, slot in transformer.state_dict().items()}
    state: dict[str, Tensor] = {}
    read = 0
    for name, tensor in weights:
        read += tensor.nbytes
        for target, piece in family.convert(name, patch(family.comfy_name(name), tensor) if patch else tensor):
            _check(target, piece, wanted, name)
            if family.in_float32(target):
                state[target] = piece.to(device, torch.float32)
            else:
                state[target] = piece.to(weight_dtype).to(device, compute_dtype)
        if on_share:
            on_share(read / max(1, weights.header.bytes))
    _check_complete(state, wanted, path)
    transformer.load_state_dict(state, assign=True)
    transformer.to(device).eval().requires_grad_(False)
    family.prepare(transformer)
    return Loaded(family=family, transformer=transformer)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules built by this thread get parameters without memory; buffers, such as rope tables, stay real.

    `torch.device("meta")` would lose what constructors compute.
    """
    register, thread = nn.Module.register_parameter, threading.get_ident()

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and threading.get_ident() == thread:
            param = nn.Parameter(param.to("meta"), requires_grad=False)
        register(module, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _check(target: str, tensor: Tensor, wanted: Mapping[str, tuple[int, ...]], source: str) -> None:
    if target not in wanted:
        raise ValueError(f"the checkpoint has {source}, for which this transformer has no place")
    if tuple(tensor.shape) != wanted[target]:
        raise ValueError(f"{source} gives {target} the shape {tuple(tensor.shape)}, it takes {wanted[target]}")


def _check_complete(state: Mapping[str, Tensor], wanted: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    if missing := sorted(wanted.keys() - state.keys()):
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        raise ValueError(f"{path} does not give the transformer its {', '.join(missing[:NAMED])}{more}")
