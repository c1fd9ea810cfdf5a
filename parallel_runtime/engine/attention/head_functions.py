"""Attention functions of a network's own, which know no ranks, on all tokens of this rank's heads.

A block is given such a function, has it as a method, or calls torch's. After an all-to-all a rank has every token of
its heads, as one process has of all heads, so the function is called once and as it is: with the masks, segments and
kept keys that it closes over. With more ranks than heads, a rank without heads calls it with one head of zeros."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...accelerators import FALLBACK
from ...architectures.split_plan import Cross, HeadFunction, HeadProducer
from ..comm.mesh import ContextMesh
from ..split.hooks import Replaced
from ..split.splitter import Splitter
from ..split.streams import chunk_range
from .attention_override import AttentionOverride, by_heads
from .context_attention import ContextAttention

Function = Callable[..., Tensor]
TORCH = "scaled_dot_product_attention"


class HeadAttention:
    """Divides attention functions over the ranks of `mesh`, for the streams of the forward in progress."""

    def __init__(self, streams: Splitter, override: AttentionOverride, mesh: ContextMesh) -> None:
        self._streams, self._override, self._mesh = streams, override, mesh

    def divided(self, function: Function, spec: HeadFunction) -> Function:
        return torch.compiler.disable(partial(self._attend, function, spec))

    def with_torchs(self, forward: Callable[..., Any], spec: HeadFunction) -> Callable[..., Any]:
        """Returns `forward` with every call of torch's attention in it divided."""

        @torch.compiler.disable
        def run(*args: Any, **kwargs: Any) -> Any:
            with Replaced(F.scaled_dot_product_attention, self.divided(F.scaled_dot_product_attention, spec)):
                return forward(*args, **kwargs)

        return run

    def produced(self, owner: nn.Module, spec: HeadProducer, full: Any, function: Function) -> Function:
        """Returns `function`, which attends in the place of a module of `owner`, for this rank's tokens."""
        if self._mesh.ring.size > 1:
            raise self._override.has_no_lse(function)
        module: Any = owner.get_submodule(spec.module)
        layers = [getattr(module, spec.qkv), *filter(None, [getattr(module, spec.gate, None)])]

        @torch.compiler.disable
        def attend(hidden: Tensor, **more: Any) -> Tensor:
            size = module.head_dim
            given = [part.unflatten(-1, (-1, size))[None] for part in layers[0](hidden).chunk(3, -1)]
            if gates := [layer(hidden).unflatten(-1, (-1, size))[None] for layer in layers[1:]]:
                beside = [gates[0], *map(torch.zeros_like, given[1:])]
                given = [torch.cat(pair, 3) for pair in zip(given, beside, strict=True)]

            def call(*tensors: Any) -> Tensor:
                parts = [tensor[..., :size] for tensor in tensors[:3]]
                parts += [tensors[0][..., size:]] * bool(gates)
                rows = torch.cat([part[0].flatten(1) for part in parts], 1)
                vars(owner)[spec.module] = _OwnHeads(module, spec, tensors[0].shape[2])
                try:
                    with self._override.undivided():
                        out = function(rows, **{**more, spec.full: full})
                finally:
                    del vars(owner)[spec.module]
                return F.pad(out.unflatten(1, (-1, size))[None], (0, tensors[0].shape[3] - size))

            out = self._attention(self._streams.call_streams, call)(*given)
            return getattr(module, spec.out)(out[0, ..., :size].flatten(1))

        return attend

    def _attend(
        self, function: Function, spec: HeadFunction, query: Tensor, key: Tensor, value: Tensor, *args: Any, **more: Any
    ) -> Tensor:
        if not self._streams.any_split:
            return function(query, key, value, *args, **more)
        first_dim, four = 1 if spec.heads_first else 2, query.ndim == 4
        heads: int = query.shape[first_dim] if four else more["heads"] if "heads" in more else args[0]
        size = query.shape[-1] if four else query.shape[-1] // heads
        start, own = chunk_range(heads, self._mesh.ulysses.parts, self._mesh.ulysses.index)
        flat: list[bool] = []

        def call(*tensors: Any) -> Tensor:
            if four:
                given = [x.transpose(1, 2) if spec.heads_first else x for x in tensors[:3]]
            else:
                given = [x.flatten(2) for x in tensors[:3]]
            rest, named = _of_heads(args, more, heads, start, tensors[0].shape[2])
            with self._override.undivided():
                out = function(*given, *rest, **named)
            flat.append(out.ndim == 3)
            return by_heads(out, size, spec.heads_first and out.ndim == 4)

        attention = self._attention(spec.streams or self._streams.call_streams, call)
        q, k, v = (by_heads(x, size, spec.heads_first and four) for x in (query, key, value))
        out = attention(q, k, v)
        # A rank without heads has called nothing yet, and has to know the shape that the function returns.
        if not own:
            streams = attention.query_streams, attention.key_streams, attention.key_streams
            call(*(query.new_zeros(len(q), self._streams.total(names), 1, size) for names in streams))
        if flat[0]:
            return out.flatten(2)
        return out.transpose(1, 2) if spec.heads_first else out

    def _attention(self, over: Any, call: Callable[..., Tensor]) -> ContextAttention:
        cross = over if isinstance(over, Cross) else Cross(queries=over, keys=over)
        return self._override.across(cross, call, FALLBACK, in_order=True, max_chunks=1)


def _of_heads(
    args: tuple[Any, ...], more: dict[str, Any], heads: int, start: int, own: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments after queries, keys and values for `own` of all `heads`."""

    def narrowed(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim != 4 or value.shape[1] != heads or heads == 1:
            return value
        return value.narrow(1, min(start, heads - own), own)

    if args and type(args[0]) is int:
        args = own, *args[1:]
    if "heads" in more:
        more = {**more, "heads": own}
    return tuple(map(narrowed, args)), {name: narrowed(value) for name, value in more.items()}


class _OwnHeads:
    """An attention module of `heads` of its heads, whose projections are made: its layers only tell them apart."""

    def __init__(self, module: Any, spec: HeadProducer, heads: int) -> None:
        self._module, self.heads = module, heads
        projected = 3 * heads * module.head_dim
        gate = getattr(module, spec.gate, None)
        setattr(self, spec.qkv, lambda rows: rows[..., :projected])
        setattr(self, spec.gate, None if gate is None else lambda rows: rows[..., projected:])
        setattr(self, spec.out, lambda rows: rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
