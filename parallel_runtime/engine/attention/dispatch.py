"""Attention on one device: `attend` for full keys, `attend_block` with the log-sum-exp that merging blocks needs; and
`choose_kernel`, the choice that all ranks make together.

Tensors are [batch, tokens, heads, head_dim], of any strides with a contiguous last dim; keys and values may have fewer
heads, each for a group of neighbouring query heads. The kernel is the requested one, else the first row of KERNELS that
auto takes on these GPUs. Every rank must have it, and compute correctly with it in one small attention; all choose the
same. To torch.compile any attention is one operator, `attend_op`."""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...accelerators import FALLBACK, KERNELS
from ...request import AttentionBackend
from ..comm.collectives import any_rank
from ..comm.mesh import MeshDim
from .registry import FUNCTIONS, cudnn_supports_graphs, heads_first, sdpa

# Takes query, key, value [B, tokens, heads, D], mask, scale, and numbers that it interprets itself; returns [B, query
# tokens, query heads, D of the values].
Attend = Callable[..., Tensor]

_TAGS = (torch.Tag.cudagraph_unsafe,)  # the host decides inside, and ranks wait for each other
_NEW_IDS = count()
_REGISTERED: WeakValueDictionary[int, Attend] = WeakValueDictionary()


def register(attend: Attend) -> int:
    """Returns the id of an attention function, which is valid as long as the caller keeps the function."""
    op_id = next(_NEW_IDS)
    _REGISTERED[op_id] = attend
    return op_id


@torch.library.custom_op("context_parallel::attend", mutates_args=(), tags=_TAGS)
def attend_op(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, op_id: int,
    extra: Sequence[int],
) -> Tensor:  # fmt: skip
    """Calls the attention function with this id; it is given the numbers `extra` too."""
    return _REGISTERED[op_id](query, key, value, mask, scale, *extra).contiguous()


@attend_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    return query.new_empty((*query.shape[:3], value.shape[3]))


T = TypeVar("T")

_MIN_CONTIGUOUS_TOKENS = 512  # tokens: with fewer, a kernel is over before a copy pays
_CHUNK = 1024  # queries whose scores are in memory at once
_BIAS_ALIGNMENT = 16  # the efficient kernel wants bias rows to start at a multiple of this many elements
# What kernels raise for a call that they have nothing for; faults of the device are RuntimeErrors too.
NO_KERNEL = (RuntimeError, ValueError, TypeError, AssertionError)
FAULTS = (torch.OutOfMemoryError, *filter(None, [getattr(torch, "AcceleratorError", None)]))  # since PyTorch 2.8

log = logging.getLogger(__name__)

_FAILURES: dict[Hashable, str] = {}  # by kind of call: why a backend has no kernel for it, "" where it has


def check_backend(backend: AttentionBackend, device: torch.device) -> None:
    """Raises ValueError if `backend` cannot run on `device` here."""
    if backend not in FUNCTIONS:
        return
    if device.type == "cpu":
        raise ValueError(f'attention_backend {backend!r} needs a GPU; on the CPU use "auto" or "native"')
    if reason := FUNCTIONS[backend].missing_reason:
        raise ValueError(f'attention_backend {backend!r} is not here: {reason}; use "auto"')


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, backend: AttentionBackend
) -> Tensor:
    """Attends with `mask` [B, 1 or H, 1 or Sq, Sk], bool or additive; as "native" where `backend` cannot."""
    if torch.compiler.is_compiling() and backend in FUNCTIONS:
        return attend_op(query, key, value, mask, scale, _OP_IDS[backend], [])
    out = try_kernel(query, key, value, mask, scale, backend)
    return attend_native(query, key, value, mask, scale) if out is None else out


_BY_BACKEND = {name: partial(attend, backend=name) for name in FUNCTIONS}  # keeps them alive
_OP_IDS = {name: register(function) for name, function in _BY_BACKEND.items()}


def attend_native(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Calls PyTorch's scaled_dot_product_attention, which supports every call."""
    return sdpa(query, repeat_kv(key, query.shape[2]), repeat_kv(value, query.shape[2]), mask, scale)


def try_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None, backend: AttentionBackend
) -> Tensor | None:
    """Returns attention with the kernel of this name; None for calls that it does not support, which is logged once."""
    if backend in ("auto", FALLBACK):
        return None
    if backend == "native":
        return attend_native(query, key, value, mask, scale)
    kernel = FUNCTIONS[backend]
    key, value = (repeat_kv(tensor, query.shape[2]) for tensor in (key, value))
    return _try(
        (backend, "full", *_call_key(query, key, value, mask)),
        lambda: kernel.unsupported_reason(query, key, value, mask),
        lambda: kernel.full(query, key, value, mask, scale),
    )


def attend_block(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None, backend: AttentionBackend
) -> tuple[Tensor, Tensor]:
    """Attends over one block of keys: returns the output [B, Sq, H, D] and its log-sum-exp [B, Sq, H, 1], float32.

    `bias` is [B, 1 or H, 1 or Sq, Sk], finite, as `additive` of context_attention.py makes it. Of a hidden block the
    output is finite, its log-sum-exp hugely negative. What `backend` has no kernel for goes where "native" would."""
    key, value = repeat_kv(key, query.shape[2]), repeat_kv(value, query.shape[2])
    if (kernel := FUNCTIONS.get(backend)) is not None:
        result = _try(
            (backend, "block", *_call_key(query, key, value, bias)),
            lambda: kernel.unsupported_reason(query, key, value, bias, with_lse=True),
            lambda: kernel.block(query, key, value, scale),
        )
        if result is not None:
            return result
    if query.device.type == "cpu":
        tensors = heads_first(*map(contiguous_by_head, (query, key, value)))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
            *tensors, 0.0, False, attn_mask=bias, scale=scale
        )
        return out.transpose(1, 2), lse.transpose(1, 2).unsqueeze(-1)
    if query.device.type != "cuda":
        return _by_matmul(query, key, value, bias, scale)
    flash = FUNCTIONS["_native_flash"]
    if not flash.unsupported_reason(query, key, value, bias, with_lse=True):
        return flash.block(query, key, value, scale)
    if bias is not None:
        keys = bias.shape[-1]
        bias = torch.nn.functional.pad(bias, (0, -keys % _BIAS_ALIGNMENT))[..., :keys]
        bias = bias.expand(query.shape[0], query.shape[2], query.shape[1], keys)
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse, *_ = efficient(*heads_first(query, key, value), bias, True, 0.0, False, scale=scale)
    return out.transpose(1, 2), lse[..., : query.shape[1]].transpose(1, 2).unsqueeze(-1)


def repeat_kv(tensor: Tensor, heads: int) -> Tensor:
    """Repeats keys or values along dim 2, so that each of `heads` query heads has its own."""
    return tensor if tensor.shape[2] == heads else tensor.repeat_interleave(heads // tensor.shape[2], dim=2)


def contiguous_by_head(tensor: Tensor) -> Tensor:
    """Returns many tokens on the CPU with each head's side by side: its kernel reads them by heads, again and again."""
    if tensor.device.type != "cpu" or tensor.shape[1] < _MIN_CONTIGUOUS_TOKENS:
        return tensor
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


@cache
def warn_once(backend: str, reason: str) -> None:
    """Logs on rank 0 that a backend is not used for some calls."""
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    log.warning(
        "[CP] attention_backend %s has no kernel for some calls: %s. Only these use the kernel that auto would choose",
        backend, reason,
    )  # fmt: skip


def _call_key(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Hashable, ...]:
    """Returns the properties of a call that decide whether a kernel supports it."""
    masked = None if mask is None else (mask.dtype, mask.shape)
    return query.device, query.dtype, key.dtype, query.shape, key.shape[1], value.shape[-1], masked


def _try(call: tuple[Any, ...], unsupported_reason: Callable[[], str], run: Callable[[], T]) -> T | None:
    """Returns the result of `run`, or None where the kernel does not support this kind of `call` (the backend is its
    first item). A kind is checked once: one that failed is not tried again, and one that succeeded is not checked
    again, also where nothing could be checked (in a graph)."""
    if call in _FAILURES:
        return None if _FAILURES[call] else run()
    reason, result = unsupported_reason(), None
    if not reason:
        try:
            result = run()
        except NO_KERNEL as error:
            if isinstance(error, FAULTS):
                raise
            reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
    _FAILURES[call] = reason
    if reason:
        warn_once(call[0], reason)
    return result


def _by_matmul(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """Attends without a kernel that returns a log-sum-exp, by matrix products by chunks of queries, in float32."""
    query, key, value = heads_first(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    outs, sums, start = list[Tensor](), list[Tensor](), 0
    for chunk in query.split(_CHUNK, dim=2):
        scores = (chunk.float() * scale) @ key.float().transpose(-1, -2)
        if bias is not None:
            scores = scores + (bias if bias.shape[2] == 1 else bias.narrow(2, start, chunk.shape[2]))
        start += chunk.shape[2]
        lse = scores.logsumexp(-1, keepdim=True)
        outs.append(((scores - lse).exp() @ value.float()).to(q.dtype))
        sums.append(lse)
    return torch.cat(outs, 2).transpose(1, 2), torch.cat(sums, 2).transpose(1, 2)


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
    # The requested kernel, then those that auto takes on any such device, not only on this rank's GPU: all ranks must
    # ask about the same ones. None is timed: at every start the same GPUs choose the same kernel, and give equal bits.
    candidates = [] if backend == "auto" else [backend]
    for name, spec in KERNELS.items():
        unsafe = recorded and spec.cudnn and not cudnn_supports_graphs()
        if name != backend and spec.auto_on and query.device.type in spec.devices and not unsafe:
            candidates.append(name)
    for name in candidates:
        if _works_on_all(name, query, kind, mesh_dim, requested=name == backend):
            return name
        if name == backend:
            warn_once(name, f"not every rank has it {'for a ring' if kind.blocks else 'for full keys'}")
    return "native" if kind.blocks else FALLBACK


def _works_on_all(name: str, query: Tensor, kind: AttentionKind, mesh_dim: MeshDim, *, requested: bool) -> bool:
    """Returns whether every rank has this kernel and computes correctly with it; the ranks ask each other once."""
    key, known = (name, kind, mesh_dim.ranks, requested), mesh_dim.group_state.working_kernels
    is_fake = isinstance(query, FakeTensor)
    if key in known and not is_fake:
        return known[key]
    kernel = FUNCTIONS[name]
    usable = not kernel.unusable_reason(query)
    # Auto takes it on some GPUs only.
    usable = usable and (requested or torch.cuda.get_device_capability(query.device)[0] in kernel.spec.auto_on)
    if is_fake:  # nothing can be computed, and nobody asked
        return usable
    if query.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    known[key] = not any_rank(not (usable and _is_accurate(name, kind, query.device, requested)), mesh_dim)
    return known[key]


def _is_accurate(name: str, kind: AttentionKind, device: torch.device, requested: bool) -> bool:
    """Compares some rows of a small attention, and their log-sum-exp for a ring, with float32."""
    # Some versions of some kernels compute something else, or have nothing for a kind of call.
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
    """Returns queries, keys and values, full keys in one tensor with the queries, as after Ulysses; and a mask that
    hides every seventh key from all queries."""
    options: Any = {"dtype": kind.dtype, "device": device, "generator": torch.Generator(device).manual_seed(0)}
    if kind.blocks:
        tokens = (_QUERIES, _KEYS, _KEYS)
        q, k, v = (torch.randn(n, _BATCH, _HEADS, kind.head_dim, **options).transpose(0, 1) for n in tokens)
    else:
        packed = torch.randn(_KEYS, _BATCH, 3 * _HEADS, kind.head_dim, **options)
        q, k, v = packed.transpose(0, 1).split(_HEADS, 2)
    if kind.mask is None:
        return q, k, v, None
    dtype, *varies_by = kind.mask
    shape = [size if varies else 1 for size, varies in zip((_BATCH, _HEADS, _KEYS), varies_by, strict=True)]
    hidden = (torch.arange(_KEYS, device=device) % 7 == 0).expand(*shape, _KEYS)
    if dtype == torch.bool:
        return q, k, v, ~hidden
    return q, k, v, torch.zeros(*shape, _KEYS, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
