"""Which kernel the attentions of one size take: what was asked for where all ranks have it, else the winner of a race.

Every rank comes to the same. Knows no streams and moves no keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...accelerators import ACCELERATORS
from ...specs import AttentionBackend
from ...wire.readings import WORTH_TELLING
from .kernels import FAULTS, NO_KERNEL, fits_flash, tell_once
from .mesh import Axis
from .operators import OPERATORS, Whole, cudnn_records, missing
from .race import Sizes, made_up, timed, timed_by_all, winner

_CUDNN_LEADS = (9, 10)  # compute capabilities for which PyTorch itself prefers cuDNN
_WRONG = 0.05  # of the values' deviation: half precision is ten times closer
_NONSENSE = 0.5  # what was asked for by name may round more (sage)
_LOOKED_AT = 16  # queries whose rows are computed anew in float32, of the first and the last head


def candidates(query: Tensor, *, recorded: bool = True) -> list[AttentionBackend]:
    """What "auto" may take for blocks of such queries, the likely fastest first; "native" where there is no choice.
    `recorded`: as part of a CUDA graph, maybe."""
    found = ACCELERATORS.get(query.device.type)
    if found is None or not found.kernels or not fits_flash(query):
        return ["native"]
    return [kernel for kernel in found.kernels if kernel != "_native_cudnn" or _cudnn_leads(query, recorded)]


def rivals(query: Tensor, *, masked: bool = False, recorded: bool = True) -> list[AttentionBackend]:
    """The same for whole keys: "auto" is ComfyUI's own attention, which anything has to beat."""
    found = ACCELERATORS.get(query.device.type)
    if found is None or not found.whole or not fits_flash(query):
        return ["auto"]
    cudnn = torch.version.hip is None and (cudnn_records() or not recorded)
    there = [
        kernel for kernel in found.whole if not OPERATORS[kernel].package or not missing(OPERATORS[kernel].package)
    ]
    if masked:
        there = [kernel for kernel in there if OPERATORS[kernel].masks]
    return ["auto", *(kernel for kernel in there if kernel != "_native_cudnn" or cudnn)]


def chosen_for_blocks(
    backend: AttentionBackend, query: Tensor, sizes: Sizes, axis: Axis, lanes: int = 1, recorded: bool = True
) -> AttentionBackend:
    """The kernel of a ring's blocks. Collective over `axis` for what it has not been asked. `recorded`: as candidates.

    Of several `lanes` each would have a race of its own, and those that compute the same must not come to other bits:
    they take the likely winner.
    """
    if isinstance(query, FakeTensor):
        return candidates(query, recorded=recorded)[0] if backend == "auto" else backend

    def seconds(name: str) -> float:
        return _seconds(name, sizes, query.device, None)

    if backend != "auto":
        if backend == "native" or _everywhere(backend, query, sizes, axis):
            return backend
        tell_once(backend, "not every rank has it for a ring's blocks")
    names = candidates(query, recorded=recorded)[: 1 if lanes > 1 else None]
    return cast(AttentionBackend, winner(names, sizes, axis, seconds, query.device))


def chosen_for_whole(
    backend: AttentionBackend,
    query: Tensor,
    sizes: Sizes,
    axis: Axis,
    own: Whole,
    lanes: int = 1,
    recorded: bool = True,
) -> AttentionBackend:
    """The kernel where keys are whole, "auto" for `own`. Collective over `axis` for what it has not been asked; of
    several `lanes`, as for blocks, none has a race."""
    if isinstance(query, FakeTensor):
        return backend
    if backend != "auto":
        if backend == "native" or _everywhere(backend, query, sizes, axis):
            return backend
        tell_once(backend, "not every rank has it where keys are whole")
    names = rivals(query, masked=sizes.mask is not None, recorded=recorded)
    if lanes > 1:
        return _likely(names, query, sizes, axis, recorded)

    def seconds(name: str) -> float:
        return _seconds(name, sizes, query.device, own)

    return cast(AttentionBackend, winner(names, sizes, axis, seconds, query.device))


def _likely(
    names: Sequence[AttentionBackend], query: Tensor, sizes: Sizes, axis: Axis, recorded: bool
) -> AttentionBackend:
    """What won wherever it was measured."""
    leads = "_native_cudnn" in names and _cudnn_leads(query, recorded)
    return "_native_cudnn" if leads and _everywhere("_native_cudnn", query, sizes, axis) else "auto"


def _cudnn_leads(query: Tensor, recorded: bool) -> bool:
    if torch.version.hip is not None or (recorded and not cudnn_records()):
        return False
    return torch.cuda.get_device_capability(query.device)[0] in _CUDNN_LEADS


def _everywhere(backend: AttentionBackend, query: Tensor, sizes: Sizes, axis: Axis) -> bool:
    """Has every rank of `axis` a kernel of this name for these sizes, which computes what it should?"""

    def seconds(name: str) -> float:
        return _seconds(name, sizes, query.device, None, clocked=False)

    return bool(timed_by_all([backend], sizes, axis, seconds, query.device))


def _seconds(name: str, sizes: Sizes, device: torch.device, own: Whole | None, *, clocked: bool = True) -> float:
    """Of one attention of these sizes, infinite where this rank has no such kernel, or one that computes something
    else; not a number where there is no memory to find out."""
    try:
        q, k, v, mask = made_up(sizes, device)
        if name in OPERATORS and OPERATORS[name].lacks(q, k, v, mask):
            return torch.inf

        def run() -> Tensor:
            if name == "auto":
                assert own is not None
                return own(q, k, v, mask, None)
            if sizes.what == "block":
                return OPERATORS[name].block(q, k, v, None)[0]
            return OPERATORS[name].whole(q, k, v, mask, None)

        if name != "auto" and not _right(run(), (q, k, v), mask, _WRONG if clocked else _NONSENSE):
            return torch.inf
        return timed(run, device) if clocked else 1.0
    except torch.OutOfMemoryError:
        return torch.nan
    except NO_KERNEL as error:
        if isinstance(error, FAULTS):
            raise
        return torch.inf


def _right(out: Tensor, given: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, tolerance: float) -> bool:
    """Some rows of it beside the same in float32. Some versions of some kernels compute something else."""
    q, k, v = given
    heads = [0, q.shape[2] - 1]
    few = q[:, :_LOOKED_AT, heads].transpose(1, 2).float() * q.shape[-1] ** -0.5
    scores = few @ k[:, :, heads].transpose(1, 2).float().transpose(-1, -2)
    if mask is not None:
        mask = (mask[:, heads] if mask.shape[1] > 1 else mask)[:, :, :_LOOKED_AT]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    expected = (scores.softmax(-1) @ v[:, :, heads].transpose(1, 2).float()).transpose(1, 2)
    away = (out[:, :_LOOKED_AT, heads].float() - expected).abs().mean()
    return bool(away <= tolerance * expected.std())  # not where it is not a number


def advice(query: Tensor, own: Whole, sizes: Sizes, alone: Axis) -> str:
    """What a worker that has the sequence to itself could gain by another kernel than its own: the name of one that is
    worth telling of, or ""."""
    names = rivals(query)
    if isinstance(query, FakeTensor) or len(names) == 1:
        return ""

    def seconds(name: str) -> float:
        return _seconds(name, sizes, query.device, own)

    times = timed_by_all(names, sizes, alone, seconds, query.device)
    fastest = min(times, key=times.__getitem__, default="auto")
    return fastest if fastest != "auto" and times["auto"] > WORTH_TELLING * times[fastest] else ""
