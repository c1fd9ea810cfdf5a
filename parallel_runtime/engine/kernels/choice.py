"""Chooses the kernel of an attention: the requested one, else the first row of KERNELS that auto takes on these GPUs.

Every rank must have it, and compute correctly with it in one small attention; all choose the same. Nothing is timed: at
every start the same GPUs choose the same kernel, and give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...accelerators import FALLBACK, KERNELS
from ...request import AttentionBackend
from ..comm.mesh import MeshDim
from ..comm.votes import any_rank
from .dispatch import FAULTS, NO_KERNEL, warn_once
from .registry import FUNCTIONS, cudnn_supports_graphs

_MAX_ERROR = 0.05  # of the values' deviation, and of a log-sum-exp: half precision is ten times closer
_MAX_ERROR_REQUESTED = 0.5  # a kernel requested by name may round more (sage)
_BATCH, _HEADS, _QUERIES, _KEYS = 2, 4, 333, 517  # of the attention that a kernel is tried with
_CHECKED_QUERIES = 16  # queries that are computed anew in float32, of the first and the last head
MaskKind = tuple[torch.dtype, bool, bool, bool]  # a mask's dtype; does it vary by batch, head, query?


@dataclass(frozen=True)
class AttentionKind:
    """What the choice of a kernel depends on, the same on all ranks: how many tokens each has does not count. `blocks`:
    a ring's blocks of keys, which need a log-sum-exp; else full keys."""

    head_dim: int
    dtype: torch.dtype
    blocks: bool
    mask: MaskKind | None = None


def choose_kernel(
    backend: AttentionBackend, query: Tensor, kind: AttentionKind, mesh_dim: MeshDim, recorded: bool = True
) -> AttentionBackend:
    """Returns the kernel; FALLBACK stands for the caller's own attention. `recorded`: it may become part of a CUDA
    graph. Collective over `mesh_dim` for a new kind."""
    if backend in ("native", FALLBACK):
        return backend
    for name in _candidates(backend, query.device, recorded):
        if _works_on_all(name, query, kind, mesh_dim, requested=name == backend):
            return name
        if name == backend:
            warn_once(name, f"not every rank has it {'for a ring' if kind.blocks else 'for full keys'}")
    return "native" if kind.blocks else FALLBACK


def _candidates(backend: AttentionBackend, device: torch.device, recorded: bool) -> Iterator[AttentionBackend]:
    """Yields the requested kernel, then those that auto takes on any such device, in the table's order. Not only what
    this rank's GPU has: all ranks must ask about the same ones."""
    if backend != "auto":
        yield backend
    for name, spec in KERNELS.items():
        unsafe = recorded and spec.cudnn and not cudnn_supports_graphs()
        if name != backend and spec.auto_on and device.type in spec.devices and not unsafe:
            yield name


def _works_on_all(name: str, query: Tensor, kind: AttentionKind, mesh_dim: MeshDim, *, requested: bool) -> bool:
    """Returns whether every rank has this kernel and computes correctly with it; the ranks ask each other once."""
    if isinstance(query, FakeTensor):  # nothing can be computed, and nobody asked
        return _is_for(name, query, requested)
    key, known = (name, kind, mesh_dim.ranks, requested), mesh_dim.group_state.working_kernels
    if key not in known:
        if query.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        works = _is_for(name, query, requested) and _is_accurate(name, kind, query.device, requested)
        known[key] = not any_rank(not works, mesh_dim)
    return known[key]


def _is_for(name: str, query: Tensor, requested: bool) -> bool:
    """Returns whether this rank's GPU has the kernel, and auto takes it there, unless it is `requested`."""
    kernel = FUNCTIONS[name]
    if kernel.unusable_reason(query):
        return False
    return requested or torch.cuda.get_device_capability(query.device)[0] in kernel.spec.auto_on


def _is_accurate(name: str, kind: AttentionKind, device: torch.device, requested: bool) -> bool:
    """Compares some rows of a small attention, and their log-sum-exp for a ring, with float32: some versions of some
    kernels compute something else, or have nothing for a kind of call."""
    kernel, (q, k, v, mask) = FUNCTIONS[name], _random_inputs(kind, device)
    try:
        if kernel.unsupported_reason(q, k, v, mask, with_lse=kind.blocks):
            return False
        out, lse = kernel.block(q, k, v, None) if kind.blocks else (kernel.full(q, k, v, mask, None), None)
    except NO_KERNEL as error:
        if isinstance(error, FAULTS):
            raise
        return False
    tolerance, heads = _MAX_ERROR_REQUESTED if requested else _MAX_ERROR, [0, q.shape[2] - 1]
    queries = q[:, :_CHECKED_QUERIES, heads].transpose(1, 2).float() * q.shape[-1] ** -0.5
    scores = queries @ k[:, :, heads].transpose(1, 2).float().transpose(-1, -2)
    if mask is not None:
        mask = (mask[:, heads] if mask.shape[1] > 1 else mask)[:, :, :_CHECKED_QUERIES]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if lse is not None:
        lse_error = (lse[:, :_CHECKED_QUERIES, heads, 0].transpose(1, 2).float() - scores.logsumexp(-1)).abs().mean()
        if not lse_error <= tolerance:
            return False
    expected = (scores.softmax(-1) @ v[:, :, heads].transpose(1, 2).float()).transpose(1, 2)
    mean_error = (out[:, :_CHECKED_QUERIES, heads].float() - expected).abs().mean()
    return bool(mean_error <= tolerance * expected.std())  # not where it is not a number


def _random_inputs(kind: AttentionKind, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns queries, keys, values and a mask; full keys in one tensor with the queries, as after Ulysses."""
    options: Any = {"dtype": kind.dtype, "device": device, "generator": torch.Generator(device).manual_seed(0)}
    if kind.blocks:
        tokens = (_QUERIES, _KEYS, _KEYS)
        q, k, v = (torch.randn(n, _BATCH, _HEADS, kind.head_dim, **options).transpose(0, 1) for n in tokens)
    else:
        packed = torch.randn(_KEYS, _BATCH, 3 * _HEADS, kind.head_dim, **options)
        q, k, v = packed.transpose(0, 1).split(_HEADS, 2)
    return q, k, v, _random_mask(kind, device)


def _random_mask(kind: AttentionKind, device: torch.device) -> Tensor | None:
    """Returns a mask that hides every seventh key from all queries."""
    if kind.mask is None:
        return None
    dtype, *varies_by = kind.mask
    shape = [size if varies else 1 for size, varies in zip((_BATCH, _HEADS, _KEYS), varies_by, strict=True)]
    hidden = (torch.arange(_KEYS, device=device) % 7 == 0).expand(*shape, _KEYS)
    if dtype == torch.bool:
        return ~hidden
    return torch.zeros(*shape, _KEYS, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
