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
from .opaque import attend_opaquely, enlist
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

    @property
    def scale(self) -> float | None:
        found: float | None = self.options.get("scale")
        return found

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, _: float | None = None) -> Tensor:
        """[B, tokens, heads, head size] of each to the same; its scale is among the options."""
        heads = q.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return self.function(q, k, v, heads, mask=mask, skip_reshape=True, **self.options).unflatten(2, (heads, -1))


# [B, tokens, heads, head size] of query, key and value, and a mask, to the same; None: as ComfyUI would.
Answer = Callable[[Tensor, Tensor, Tensor, Tensor | None, _Call], Tensor | None]

_SETTINGS: list[_Call] = []  # of all calls that graphs make


@torch.compiler.assume_constant_result
def _number_of(function: Attention, **options: Any) -> int:
    """Of these settings: a graph passes tensors and numbers only."""
    call = _Call(function, options)
    if call not in _SETTINGS:
        _SETTINGS.append(call)
    return _SETTINGS.index(call)


class ByBackend:
    """A kernel of ours in place of ComfyUI's, but for calls that it has nothing for: ComfyUI knows who has.

    `scopes` are the numbers of the scopes that run, innermost last; `previous` is what a node has in this place.
    """

    def __init__(self, backend: AttentionBackend) -> None:
        self.scopes: list[int] = []
        self.previous: Override | None = None
        self._backend = backend
        self._asked = self._asked_by_a_graph  # lives as long as this
        self._number = enlist(self._asked)

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
        if attn_precision is not None:
            options["attn_precision"] = attn_precision
        scope = self.scopes[-1] if self.scopes else _OUTSIDE
        tokens = 2 if skip_reshape else 1
        traced = torch.compiler.is_compiling() and self.previous is None
        answer = None if traced else self._answer(scope, q.shape[tokens], k.shape[tokens])
        out = None
        if traced or answer is not None:
            size = q.shape[-1] if skip_reshape else q.shape[-1] // heads
            query, key, value = (_by_heads(x, size, skip_reshape) for x in (q, k, v))
            if answer is None:
                plain = {name: value for name, value in options.items() if name not in _OF_THE_CALLER}
                settings = [scope, _number_of(func, **plain)]
                out = attend_opaquely(query, key, value, mask, None, self._number, settings)
            else:
                out = answer(query, key, value, mask, _Call(self._own(func), options))
        if out is None:
            layout = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
            return self._own(func)(q, k, v, heads, mask=mask, **layout, **options)
        return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)

    def _asked_by_a_graph(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, _: None, scope: int, settings: int
    ) -> Tensor:
        call = _Call(self._own(_SETTINGS[settings].function), _SETTINGS[settings].options)
        answer = self._answer(scope, q.shape[1], k.shape[1])
        out = None if answer is None else answer(q, k, v, mask, call)
        return call(q, k, v, mask) if out is None else out

    def _own(self, func: Attention) -> Attention:
        """What attends where no kernel of ours is chosen: ComfyUI's, or a node's."""
        if (previous := self.previous) is None:
            return func
        return lambda *args, **kwargs: previous(func, *args, **kwargs)

    def _answer(self, scope: int, queries: int, keys: int) -> Answer | None:
        """What attends in place of ComfyUI's to so many tokens; None where nothing does."""
        return None if self.previous or self._backend == "auto" else self._attempt

    def _attempt(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: _Call) -> Tensor | None:
        return attempt(q, k, v, _four_dims(mask), call.scale, self._backend)


@cache
def by_backend(backend: AttentionBackend) -> ByBackend:
    """The one of this name."""
    return ByBackend(backend)


class Overriding(ByBackend):
    """The override of a divided network's attention: over all ranks where its streams are cut."""

    def __init__(self, cuts: Cuts, mesh: ContextMesh, parallelism: Parallelism, patches: Patches | None = None) -> None:
        super().__init__(parallelism.attention_backend)
        self.shared = 0  # attentions over all ranks in this forward
        self._cuts = cuts
        self._mesh = mesh
        self._parallelism = parallelism
        self._patches = patches
        self._call: _Call | None = None
        self._kinds: list[Attends] = []  # by scope
        self._attentions: dict[Cross, ContextAttention] = {}

    def scope(self, over: Attends) -> int:
        """The number of a scope."""
        if over not in self._kinds:
            self._kinds.append(over)
        return self._kinds.index(over)

    def _answer(self, scope: int, queries: int, keys: int) -> Answer | None:
        cross = self._cross(scope, queries, keys)
        return super()._answer(scope, queries, keys) if cross is None else partial(self._together, cross, scope)

    def _together(
        self, cross: Cross, scope: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: _Call
    ) -> Tensor:
        self.shared += 1
        self._call = call
        return self._attention(cross)(q, k, v, _four_dims(self._of_all(mask, scope, q)), call.scale)

    def _of_all(self, mask: Tensor | None, scope: int, query: Tensor) -> Tensor | None:
        """The mask; of a window, that of all tokens."""
        kind = self._kinds[scope]
        if not isinstance(kind, Window):
            return mask
        total, width = self._cuts.total(kind.streams), int(kind.width)
        return self._cuts.streams.kept(("near", total, width), lambda: _near(total, width, query.device))

    def _cross(self, scope: int, queries: int, keys: int) -> Cross | None:
        """The streams of an attention of so many tokens; None where it is local."""
        if scope == _OUTSIDE:
            if self._cuts.holds_any():
                raise Refused(
                    "an attention runs between blocks, where a worker holds a part of the tokens; set ring and Ulysses "
                    "degrees to 1"
                )
            return None
        now = self._kinds[scope]
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
