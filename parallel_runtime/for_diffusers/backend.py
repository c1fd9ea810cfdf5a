"""The one hook into diffusers: our attention, registered there as one more attention backend.

diffusers' processors call `dispatch_attention_fn(..., backend=self._attention_backend,
parallel_config=self._parallel_config)`. A processor whose two attributes name our backend and a ContextAttention
reaches us; nothing that diffusers registered itself is changed, and no process-wide setting is touched.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor

from ..specs import AttentionBackend
from ..worker.engine.attention import ContextAttention
from ..worker.engine.kernels import attend


@cache
def backend_name(kernel: AttentionBackend) -> AttentionBackendName:
    """The name under which diffusers finds us. Calls without a ContextAttention are local, on `kernel`.

    `dispatch_attention_fn` takes members of its enum only, and an enum cannot grow: this is one that is not listed
    among its members, so that no list of choices in diffusers shows it.
    """
    name = str.__new__(AttentionBackendName, f"context_parallel_{kernel}")
    name._name_ = name._value_ = f"context_parallel_{kernel}"

    def context_parallel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        _parallel_config: Any = None,
    ) -> Tensor:
        if dropout_p or is_causal:
            raise ValueError("dropout and causal attention cannot be cut over ranks yet")
        if _parallel_config is None:
            return attend(query, key, value, attn_mask, scale, kernel)
        assert isinstance(_parallel_config, ContextAttention)
        return _parallel_config(query, key, value, attn_mask, scale)

    _AttentionBackendRegistry.register(name)(context_parallel)
    return name
