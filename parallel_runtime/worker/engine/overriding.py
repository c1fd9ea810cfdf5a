"""ComfyUI's attention taken over: its `optimized_attention_override` leads here, where a call's streams are known.

Knows no plan as a whole: scopes say over which streams the attention that runs now is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...errors import Refused
from ...plan import Attends, Cross, Over
from ...specs import AttentionBackend, Parallelism
from .attention import ContextAttention
from .cuts import Cuts
from .kernels import attend
from .mesh import ContextMesh

Attention = Callable[..., Tensor]  # ComfyUI's, called as its optimized_attention
Override = Callable[..., Tensor]  # the same, after the function that it stands for


@dataclass(frozen=True, eq=False)
class _Call:
    """Attention as ComfyUI would run it where keys are whole."""

    function: Attention
    options: dict[str, Any]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        """[B, tokens, heads, head size] of each to the same."""
        heads = q.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return self.function(q, k, v, heads, mask=mask, skip_reshape=True, **self.options).unflatten(2, (heads, -1))


class Overriding:
    """The override of a network's attention; `scopes` are the streams of the modules that run, innermost last."""

    def __init__(self, cuts: Cuts, mesh: ContextMesh, parallelism: Parallelism) -> None:
        self.scopes: list[Attends] = []
        self.previous: Override | None = None
        self.shared = 0  # attentions over all ranks in this forward
        self._cuts = cuts
        self._mesh = mesh
        self._parallelism = parallelism
        self._call: _Call | None = None
        self._attentions: dict[Cross, ContextAttention] = {}

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
        **kwargs: Any,
    ) -> Tensor:
        tokens = 2 if skip_reshape else 1
        cross = self._cross(q.shape[tokens], k.shape[tokens])
        function = self._function(func)
        kwargs["attn_precision"] = attn_precision
        if cross is None:
            layout = {"skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
            return function(q, k, v, heads, mask=mask, **layout, **kwargs)
        size = q.shape[-1] if skip_reshape else q.shape[-1] // heads
        q, k, v = (x.transpose(1, 2) if skip_reshape else x.reshape(*x.shape[:2], -1, size) for x in (q, k, v))
        self.shared += 1
        self._call = _Call(function, kwargs)
        out = self._attention(cross)(q, k, v, _four_dims(mask), kwargs.get("scale"))
        return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)

    def _function(self, func: Attention) -> Attention:
        if (previous := self.previous) is not None:
            return lambda *args, **kwargs: previous(func, *args, **kwargs)
        backend = self._parallelism.attention_backend
        return func if backend == "auto" else by_backend(backend)

    def _cross(self, queries: int, keys: int) -> Cross | None:
        """The streams of an attention of so many tokens; None where it is local."""
        now = self.scopes[-1] if self.scopes else self._outside()
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
            ours = self._parallelism.attention_backend != "auto" and self.previous is None
            self._attentions[cross] = ContextAttention(
                self._mesh, self._parallelism, self._cuts.streams, cross.queries, cross.keys,
                None if ours else self._whole_keys,
            )  # fmt: skip
        return self._attentions[cross]

    def _whole_keys(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
        assert self._call is not None
        return self._call(q, k, v, mask, scale)


def by_backend(backend: AttentionBackend) -> Attention:
    """A function that is called as ComfyUI's optimized_attention, on a kernel of ours."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None, skip_reshape: bool = False,
        skip_output_reshape: bool = False, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        size = q.shape[-1] if skip_reshape else q.shape[-1] // heads
        q, k, v = (x.transpose(1, 2) if skip_reshape else x.reshape(*x.shape[:2], -1, size) for x in (q, k, v))
        out = attend(q, k, v, _four_dims(mask), kwargs.get("scale"), backend)
        return out.transpose(1, 2) if skip_output_reshape else out.flatten(2)

    return attention


def _crossing(over: Over) -> Cross:
    assert not isinstance(over, str)
    return over if isinstance(over, Cross) else Cross(queries=over, keys=over)


def _four_dims(mask: Tensor | None) -> Tensor | None:
    """[batch, heads, queries, keys], as ComfyUI reads masks of fewer dims."""
    if mask is None or mask.ndim == 4:
        return mask
    return mask[None, None] if mask.ndim == 2 else mask.unsqueeze(1)
