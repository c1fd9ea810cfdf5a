"""Replaces ComfyUI's attention, through its `optimized_attention_override`, by attention over split streams.

Knows no plan as a whole: scopes say over which streams the attention that runs now is. To torch.compile it is one
operator: what it decides by changes while a graph runs. Modules that call attention without transformer_options get
their names for it wrapped. All networks of a process share them, so a name is restored after the last network."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor

from ...accelerators import ANY_EXACT, FALLBACK, ring_backend
from ...architectures.block_patches import attends_each_head, attention_called_by
from ...architectures.split_plan import AttentionSpecs, Cross, Names, Window
from ...errors import Refused, Unsplittable
from ...request import AttentionBackend
from ...specs import Parallelism
from ..comm.mesh import ContextMesh
from ..split.streams import Streams
from .context_attention import ContextAttention
from .dispatch import attend_op, register, try_kernel, warn_once
from .registry import FUNCTIONS
from .ring_and_ulysses import MAX_HEAD_CHUNKS

Attention = Callable[..., Tensor]  # ComfyUI's, called as its optimized_attention
Override = Callable[..., Tensor]  # called with the native attention function, then with its arguments

OVERRIDE = "optimized_attention_override"  # ComfyUI's option for one
_NO_SCOPE = -1  # the index outside of all scopes
_LOW_PRECISION = "low_precision_attention"  # ComfyUI's word: False where a kernel that quantises would be wrong
_CALLER_OPTIONS = ("transformer_options", "_inside_attn_wrapper")
_ACTIVE: "list[AttentionOverride]" = []  # one network at a time runs in a process; what graphs can read
_USERS: Counter[str] = Counter()  # networks by module whose names are wrapped


@dataclass(frozen=True)
class _NativeCall:
    """A call of ComfyUI's own attention, for full keys."""

    function: Attention
    options: dict[str, Any]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, _: float | None = None) -> Tensor:
        """Takes and returns [B, tokens, heads, head size]; the scale is among the options."""
        heads = q.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return self.function(q, k, v, heads, mask=mask, skip_reshape=True, **self.options).unflatten(2, (heads, -1))


# Takes query, key and value [B, tokens, heads, head size] and a mask; returns the output, or None for ComfyUI's own.
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, _NativeCall], Tensor | None]

_CALLS: list[_NativeCall] = []  # the calls in compiled graphs, by index


@torch.compiler.assume_constant_result
def _call_index(function: Attention, **options: Any) -> int:
    """Returns the index of this call in _CALLS: a custom op takes tensors and numbers only."""
    call = _NativeCall(function, options)
    if call not in _CALLS:
        _CALLS.append(call)
    return _CALLS.index(call)


class BackendOverride:
    """Runs attention with the chosen backend's kernel; calls that it does not support go to ComfyUI's attention.

    `active_scopes` are the indices of the entered scopes, innermost last; `previous` is an override set by a node.
    `preferred` are the functions that the file chose for attentions that run now: ComfyUI's, without an override."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.active_scopes: list[int] = []
        self.previous: Override | None = None
        self.preferred: list[Attention] = []
        self._backend = backend
        self._graph_function = self._run_in_graph  # lives as long as this
        self._op_id = register(self._graph_function)

    def __call__(
        self, func: Attention, q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None,
        attn_precision: Any = None, skip_reshape: bool = False, skip_output_reshape: bool = False, **options: Any,
    ) -> Tensor:  # fmt: skip
        if attn_precision is not None:
            options["attn_precision"] = attn_precision
        if self.preferred and self.previous is None:
            func = self.preferred[-1]
        scope = self.active_scopes[-1] if self.active_scopes else _NO_SCOPE
        tokens = 2 if skip_reshape else 1
        traced = torch.compiler.is_compiling() and self.previous is None
        attend = None if traced else self._select(scope, q.shape[tokens], k.shape[tokens])
        out = None
        if traced or attend is not None:
            size = q.shape[-1] if skip_reshape else q.shape[-1] // heads
            query, key, value = (by_heads(x, size, skip_reshape) for x in (q, k, v))
            if attend is None:
                plain = {name: value for name, value in options.items() if name not in _CALLER_OPTIONS}
                settings = [scope, _call_index(func, **plain)]
                out = attend_op(query, key, value, mask, None, self._op_id, settings)
            else:
                out = attend(query, key, value, mask, _NativeCall(self._fallback(func), options))
        if out is None:
            layout = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
            return self._fallback(func)(q, k, v, heads, mask=mask, **layout, **options)
        return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)

    def _run_in_graph(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, _: None, scope: int, settings: int
    ) -> Tensor:
        call = _NativeCall(self._fallback(_CALLS[settings].function), _CALLS[settings].options)
        attend = self._select(scope, q.shape[1], k.shape[1])
        out = None if attend is None else attend(q, k, v, mask, call)
        return call(q, k, v, mask) if out is None else out

    def _fallback(self, func: Attention) -> Attention:
        """Returns the attention for calls that no chosen kernel takes: a node's override, or ComfyUI's own."""
        if (previous := self.previous) is None:
            return func
        return lambda *args, **kwargs: previous(func, *args, **kwargs)

    def _select(self, scope: int, queries: int, keys: int) -> Attend | None:
        """Returns the function that replaces ComfyUI's attention for these token counts; None for ComfyUI's own."""
        return None if self.previous or self._backend == "auto" else self._attempt

    def _attempt(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: _NativeCall) -> Tensor | None:
        return try_kernel(q, k, v, _four_dims(mask), call.options.get("scale"), self._backend_for(call))

    def _backend_for(self, call: _NativeCall) -> AttentionBackend:
        """Returns the chosen backend, alike on all ranks; FALLBACK where a node attends or for high precision."""
        backend = self._requested(call)
        kernel = FUNCTIONS.get(backend)
        if kernel is None or not kernel.spec.low_precision or call.options.get(_LOW_PRECISION) is not False:
            return backend
        warn_once(backend, "ComfyUI asks for higher precision")
        return FALLBACK

    def _requested(self, _: _NativeCall) -> AttentionBackend:
        return self._backend if self.previous is None else FALLBACK


backend_override = cache(BackendOverride)  # one for each name: a recording's key has it


class AttentionOverride(BackendOverride):
    """The override of a parallelized network: attends over all ranks where streams are split."""

    def __init__(self, streams: Streams, mesh: ContextMesh, parallelism: Parallelism) -> None:
        super().__init__(parallelism.options.attention_backend)
        self.split_calls = 0  # attentions over all ranks in this forward
        self.wrapped_modules: tuple[str, ...] = ()
        self._streams = streams
        self._mesh = mesh
        self._parallelism = parallelism
        self._call: Callable[..., Tensor]  # the latest
        self._scope_specs: list[AttentionSpecs] = []  # by scope
        self._attentions: dict[tuple[Cross, AttentionBackend, bool, int], ContextAttention] = {}
        self._ring_kernel = ""  # what a node's override calls

    def begin(self, previous: Override | None) -> None:
        """Begins a forward, for which a node has set `previous`. Wrapped functions use this override until `end`."""
        self._ring_kernel = "" if previous is None else ring_backend(attention_called_by(previous))
        if previous is not None and self._mesh.ring.size > 1 and not self._ring_kernel:
            raise self.has_no_lse(previous)
        if previous is not None and not attends_each_head(previous):
            raise Refused("attention.all_heads", option=OVERRIDE)
        self.previous = previous
        _ACTIVE[:] = [self]

    @contextmanager
    def undivided(self) -> Iterator[None]:
        """Has attention that runs meanwhile be of full tokens, as a head function's is."""
        self.active_scopes.append(self.scope_index("local"))
        try:
            yield
        finally:
            self.active_scopes.pop()

    def end(self) -> None:
        _ACTIVE.clear()
        self.active_scopes.clear()
        self.preferred.clear()
        self.split_calls = 0

    def scope_index(self, over: AttentionSpecs) -> int:
        """Returns the index of a scope, a new one for new specs."""
        if over not in self._scope_specs:
            self._scope_specs.append(over)
        return self._scope_specs.index(over)

    def _select(self, scope: int, queries: int, keys: int) -> Attend | None:
        if scope == _NO_SCOPE:
            if self._streams.any_split:
                raise Unsplittable("an attention runs between blocks, where a worker has only a part of the tokens")
            return super()._select(scope, queries, keys)
        spec = self._scope_specs[scope]
        over = spec if isinstance(spec, list) else [spec]
        for kind in over:
            if isinstance(kind, str):  # "local"
                return super()._select(scope, queries, keys)
            streams = kind.streams if isinstance(kind, Window) else kind
            cross = streams if isinstance(streams, Cross) else Cross(queries=streams, keys=streams)
            if (self._streams.local_count(cross.queries), self._streams.local_count(cross.keys)) == (queries, keys):
                return partial(self._attend_split, cross, scope)
        raise Unsplittable(f"an attention of {queries} over {keys} tokens fits none of {over}")

    def _attend_split(
        self, cross: Cross, scope: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: _NativeCall
    ) -> Tensor:
        # A node's override may choose tokens by their places.
        attend = self.across(cross, call, self._backend_for(call), in_order=self.previous is not None)
        spec = self._scope_specs[scope]
        if isinstance(spec, Window):
            total, width = self._streams.total(spec.streams), int(spec.width)
            mask = self._streams.cached(("near", total, width), lambda: _window_mask(total, width, q.device))
        return attend(q, k, v, _four_dims(mask), call.options.get("scale"))

    def across(
        self, over: Cross | Names, call: Callable[..., Tensor], backend: AttentionBackend, *, in_order: bool,
        max_chunks: int = MAX_HEAD_CHUNKS,
    ) -> ContextAttention:  # fmt: skip
        """Returns the attention over all ranks for the streams `over`, whose fallback is `call` from now on."""
        cross = over if isinstance(over, Cross) else Cross(queries=over, keys=over)
        self.split_calls += 1
        self._call = call
        attention = self._attentions.get((cross, backend, in_order, max_chunks))
        if attention is None:
            attention = self._attentions[cross, backend, in_order, max_chunks] = ContextAttention(
                self._mesh, self._parallelism.with_options(attention_backend=backend), self._streams, cross.queries,
                cross.keys, fallback=lambda *inputs: self._call(*inputs), max_chunks=max_chunks, in_order=in_order,
            )  # fmt: skip
        return attention

    def _requested(self, call: _NativeCall) -> AttentionBackend:
        """Returns what a node chose, else the widget's backend, or with auto what ComfyUI's flags or the file chose:
        full keys have that very function, a ring's blocks the kernel that it calls."""
        if self.previous is not None:
            return self._ring_kernel if self._mesh.ring.size > 1 else FALLBACK
        name = getattr(call.function, "__name__", "")
        if self._backend != "auto" or (self._mesh.ring.size == 1 and name in ANY_EXACT):
            return self._backend
        if self._mesh.ring.size == 1:
            return FALLBACK
        kernel = ring_backend(name)
        if self.preferred and not kernel:
            raise self.has_no_lse(call.function)
        return kernel or self._backend

    def has_no_lse(self, attention: Any) -> Refused:
        """Returns the refusal of an attention that a ring cannot have, since it gives no log-sum-exp."""
        name = getattr(attention, "__qualname__", type(attention).__qualname__)
        return Refused("ring.node", widget="ring_degree", ring=self._mesh.ring.size, attention=name)


def by_heads(x: Tensor, size: int, heads_first: bool) -> Tensor:
    """Reshapes a tensor in ComfyUI's layout to [B, tokens, heads, head size]."""
    return x.transpose(1, 2) if heads_first else x.reshape(*x.shape[:2], -1, size)


def _window_mask(total: int, width: int, device: torch.device) -> Tensor:
    """Returns [1, 1, total, total]: True for tokens at most `width` apart."""
    positions = torch.arange(total, device=device)
    return ((positions[:, None] - positions).abs() <= width)[None, None]


def _four_dims(mask: Tensor | None) -> Tensor | None:
    """Returns the mask as [batch, heads, queries, keys], as ComfyUI reads masks of fewer dims."""
    if mask is None or mask.ndim == 4:
        return mask
    return mask[None, None] if mask.ndim == 2 else mask.unsqueeze(1)


_WRAPPED = ("optimized_attention", "optimized_attention_masked", "optimized_attention_for_device")


@contextmanager
def wrap_modules(modules: Sequence[str], override: AttentionOverride) -> Iterator[None]:
    """Wraps the attention functions of these modules within this context, for forwards with this override."""
    override.wrapped_modules = tuple(modules)
    for name in modules:
        _USERS[name] += 1
        members = vars(sys.modules[name])
        for called in members.keys() & _WRAPPED if _USERS[name] == 1 else ():
            members[called] = _with_override(members[called], name, chooses=called == "optimized_attention_for_device")
    yield
    _ACTIVE.clear()
    for name in modules:
        _USERS[name] -= 1
        members = vars(sys.modules[name])
        for called in members.keys() & _WRAPPED if not _USERS[name] else ():
            members[called] = members[called].__wrapped__


def _with_override(function: Callable[..., Any], module: str, *, chooses: bool = False) -> Callable[..., Any]:
    """Returns an attention function of `module` with the active override, or, where it `chooses` one, that gives it to
    that one."""
    if chooses:
        return wraps(function)(lambda *args, **kwargs: _with_override(function(*args, **kwargs), module))

    @wraps(function)
    def call_with_override(*args: Any, **kwargs: Any) -> Tensor:
        # A module that was imported meanwhile has taken this one for ComfyUI's: for other networks it is.
        wanted = bool(_ACTIVE) and module in _ACTIVE[0].wrapped_modules
        if wanted and not kwargs.get("transformer_options"):
            kwargs["transformer_options"] = {OVERRIDE: _ACTIVE[0]}
        return function(*args, **kwargs)

    return call_with_override
