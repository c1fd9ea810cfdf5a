"""ComfyUI's attention taken over: its `optimized_attention_override` leads here, where a call's streams are known.

Knows no plan as a whole: scopes say over which streams the attention that runs now is. To torch.compile it is one
operator: what it decides by changes while a graph runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ...errors import Refused
from ...plan import Attends, Cross, Over, Window
from ...specs import AttentionBackend, Parallelism
from .attention import ContextAttention
from .cuts import Cuts
from .kernels import attempt
from .mesh import ContextMesh
from .opaque import answer_opaquely, enlist
from .patches import Patches

Attention = Callable[..., Tensor]  # ComfyUI's, called as its optimized_attention
Override = Callable[..., Tensor]  # the same, after the function that it stands for

_OUTSIDE = -1  # of all scopes
_OF_THE_CALLER = ("transformer_options", "_inside_attn_wrapper")


@dataclass(frozen=True)
class _Call:
    """Attention as ComfyUI would run it where keys are whole."""

    function: Attention
    options: dict[str, Any]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        """[B, tokens, heads, head size] of each to the same."""
        heads = q.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return self.function(q, k, v, heads, mask=mask, skip_reshape=True, **self.options).unflatten(2, (heads, -1))


_SETTINGS: list[_Call] = []  # of all calls that graphs make


@torch.compiler.assume_constant_result
def _number_of(function: Attention, **options: Any) -> int:
    """Of these settings: a graph passes tensors and numbers only."""
    call = _Call(function, options)
    if call not in _SETTINGS:
        _SETTINGS.append(call)
    return _SETTINGS.index(call)


class Overriding:
    """The override of a network's attention; `scopes` are the numbers of the scopes that run, innermost last."""

    def __init__(self, cuts: Cuts, mesh: ContextMesh, parallelism: Parallelism, patches: Patches | None = None) -> None:
        self.scopes: list[int] = []
        self.previous: Override | None = None
        self.shared = 0  # attentions over all ranks in this forward
        self._cuts = cuts
        self._mesh = mesh
        self._parallelism = parallelism
        self._patches = patches
        self._call: _Call | None = None
        self._kinds: list[Attends] = []  # by scope
        self._attentions: dict[Cross, ContextAttention] = {}
        self._number = enlist(self)

    def scope(self, over: Attends) -> int:
        """The number of a scope."""
        if over not in self._kinds:
            self._kinds.append(over)
        return self._kinds.index(over)

    def __call__(
        self,
        func: Attention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        heads: int,
        mask: Tensor | None = None,
        attn_precision: Any = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **options: Any,
    ) -> Tensor:
        options["attn_precision"] = attn_precision
        scope = self.scopes[-1] if self.scopes else _OUTSIDE
        traced = torch.compiler.is_compiling() and self.previous is None
        tokens = 2 if skip_reshape else 1
        cross = None if traced else self._cross(scope, q.shape[tokens], k.shape[tokens])
        if not traced and cross is None:
            layout = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
            return self._local(func)(q, k, v, heads, mask=mask, **layout, **options)
        size = q.shape[-1] if skip_reshape else q.shape[-1] // heads
        q, k, v = (_by_heads(x, size, skip_reshape) for x in (q, k, v))
        if cross is None:
            plain = {name: value for name, value in options.items() if name not in _OF_THE_CALLER}
            out = answer_opaquely(q, k, v, mask, scope, _number_of(func, **plain), self._number)
        else:
            out = self._together(cross, q, k, v, self._of_all(mask, scope, q), _Call(self._own(func), options))
        return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)

    def answer(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scope: int, settings: int) -> Tensor:
        """What a graph asks for: [B, tokens, heads, head size] of each to the same."""
        found = _SETTINGS[settings]
        cross = self._cross(scope, q.shape[1], k.shape[1])
        if cross is None:
            call = _Call(self._local(found.function), found.options)
            return call(q, k, v, mask, call.options.get("scale"))
        mask = self._of_all(mask, scope, q)
        return self._together(cross, q, k, v, mask, _Call(self._own(found.function), found.options))

    def _of_all(self, mask: Tensor | None, scope: int, query: Tensor) -> Tensor | None:
        """The mask; of a window, that of all tokens."""
        kind = self._kinds[scope]
        if not isinstance(kind, Window):
            return mask
        total, width = self._cuts.total(kind.streams), int(kind.width)
        return self._cuts.streams.kept(("near", total, width), lambda: _near(total, width, query.device))

    def _together(self, cross: Cross, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: _Call) -> Tensor:
        self.shared += 1
        self._call = call
        return self._attention(cross)(q, k, v, _four_dims(mask), call.options.get("scale"))

    def _own(self, func: Attention) -> Attention:
        """What attends where no kernel of ours is chosen: ComfyUI's, or a node's."""
        if (previous := self.previous) is None:
            return func
        return lambda *args, **kwargs: previous(func, *args, **kwargs)

    def _local(self, func: Attention) -> Attention:
        """What attends to tokens that no other rank has a part of."""
        backend = self._parallelism.attention_backend
        return self._own(func) if self.previous or backend == "auto" else partial(by_backend(backend), func)

    def _cross(self, scope: int, queries: int, keys: int) -> Cross | None:
        """The streams of an attention of so many tokens; None where it is local."""
        now = self._outside() if scope == _OUTSIDE else self._kinds[scope]
        over = now if isinstance(now, list) else [now]
        for kind in over:
            if kind == "local":
                return None
            cross = _crossing(kind)
            if self._cuts.held(cross.queries) == queries and self._cuts.held(cross.keys) == keys:
                return cross
        raise Refused(
            f"an attention of {queries} over {keys} tokens fits none of {over}; this ComfyUI or this input needs "
            "another plan: set ring and Ulysses degrees to 1"
        )

    def _outside(self) -> Over:
        if self._cuts.holds_any():
            raise Refused(
                "an attention runs between blocks, where a worker holds a part of the tokens; set ring and Ulysses "
                "degrees to 1"
            )
        return "local"

    def _attention(self, cross: Cross) -> ContextAttention:
        if cross not in self._attentions:
            self._attentions[cross] = ContextAttention(
                self._mesh, self._parallelism, self._cuts.streams, cross.queries, cross.keys,
                own=self._whole_keys, fixed=lambda: self.previous is not None, patches=self._patches,
            )  # fmt: skip
        return self._attentions[cross]

    def _whole_keys(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        assert self._call is not None
        return self._call(q, k, v, mask, scale)


@dataclass(eq=False)
class ByBackend:
    """A kernel of ours in place of ComfyUI's, but for calls that it has nothing for: ComfyUI knows who has."""

    backend: AttentionBackend

    def __post_init__(self) -> None:
        self._number = enlist(self)

    def __call__(
        self, func: Attention, q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None,
        skip_reshape: bool = False, skip_output_reshape: bool = False, **options: Any,
    ) -> Tensor:  # fmt: skip
        size = q.shape[-1] if skip_reshape else q.shape[-1] // heads
        by_heads = _by_heads(q, size, skip_reshape), _by_heads(k, size, skip_reshape), _by_heads(v, size, skip_reshape)
        if torch.compiler.is_compiling():
            plain = {name: value for name, value in options.items() if name not in _OF_THE_CALLER}
            out = answer_opaquely(*by_heads, mask, _OUTSIDE, _number_of(func, **plain), self._number)
        else:
            found = attempt(*by_heads, _four_dims(mask), options.get("scale"), self.backend)
            if found is None:
                layout = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
                return func(q, k, v, heads, mask=mask, **layout, **options)
            out = found
        return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)

    def answer(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scope: int, settings: int) -> Tensor:
        """What a graph asks for: [B, tokens, heads, head size] of each to the same."""
        call = _SETTINGS[settings]
        found = attempt(q, k, v, _four_dims(mask), call.options.get("scale"), self.backend)
        return call(q, k, v, mask, call.options.get("scale")) if found is None else found


@cache
def by_backend(backend: AttentionBackend) -> ByBackend:
    """The one of this name."""
    return ByBackend(backend)


def _by_heads(x: Tensor, size: int, heads_first: bool) -> Tensor:
    """[B, tokens, heads, head size] of what ComfyUI's attention is called with."""
    return x.transpose(1, 2) if heads_first else x.reshape(*x.shape[:2], -1, size)


def _crossing(over: Over) -> Cross:
    assert not isinstance(over, str)
    if isinstance(over, Cross):
        return over
    streams = over.streams if isinstance(over, Window) else over
    return Cross(queries=streams, keys=streams)


def _near(total: int, width: int, device: torch.device) -> Tensor:
    """[1, 1, total, total]: True where two tokens are no further apart than `width`."""
    places = torch.arange(total, device=device)
    return ((places[:, None] - places).abs() <= width)[None, None]


def _four_dims(mask: Tensor | None) -> Tensor | None:
    """[batch, heads, queries, keys], as ComfyUI reads masks of fewer dims."""
    if mask is None or mask.ndim == 4:
        return mask
    return mask[None, None] if mask.ndim == 2 else mask.unsqueeze(1)
