"""The one hook into diffusers, and attention processors of ours for those of diffusers that would stay local, or mask
what cannot be split.

diffusers' processors call `dispatch_attention_fn(..., backend=self._attention_backend,
parallel_config=self._parallel_config)`. A processor whose two attributes name our backend and a ContextAttention
reaches us; nothing that diffusers registered itself is changed, and no process-wide setting is touched.

Each processor of ours is diffusers' own, line by line the same arithmetic, with `dispatch_attention_fn` in the place of
torch's call."""

from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, dispatch_attention_fn
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15AttnProcessor2_0
from diffusers.models.transformers.transformer_lumina2 import Lumina2AttnProcessor2_0
from torch import Tensor, nn

from ..engine.attention.context_attention import ContextAttention
from ..engine.attention.dispatch import attend
from ..request import AttentionBackend


@cache
def backend_name(kernel: AttentionBackend) -> AttentionBackendName:
    """Returns the name under which diffusers finds us. Calls without a ContextAttention are local, on `kernel`."""
    # `dispatch_attention_fn` takes members of its enum only, and an enum cannot grow: this is one that is not listed
    # among its members, so that no list of choices in diffusers shows it.
    name = str.__new__(AttentionBackendName, f"context_parallel_{kernel}")
    name._name_ = name._value_ = f"context_parallel_{kernel}"

    def context_parallel(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, _parallel_config: Any = None,
    ) -> Tensor:  # fmt: skip
        if dropout_p or is_causal:
            raise ValueError("dropout and causal attention cannot be split over ranks yet")
        if _parallel_config is None:
            return attend(query, key, value, attn_mask, scale, kernel)
        assert isinstance(_parallel_config, ContextAttention)
        return _parallel_config(query, key, value, attn_mask, scale)

    _AttentionBackendRegistry.register(name)(context_parallel)
    return name


def aware(processor: Any) -> Any:
    """Returns ours for what `processor` does, or `processor` itself where we have none for it."""
    replacement = _REPLACEMENTS.get(type(processor))
    return processor if replacement is None else replacement()


class Aware:
    """Has the attributes that `attach` sets on a processor, and calls the attention that they select."""

    _attention_backend: AttentionBackendName | None = None
    _parallel_config: ContextAttention | None = None

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Takes [B, tokens, H, D] of each; returns [B, tokens, H D]."""
        settings: Any = {"backend": self._attention_backend, "parallel_config": self._parallel_config}
        return dispatch_attention_fn(query, key, value, **options, **settings).flatten(2)


class JointAttention(Aware):
    """Replaces JointAttnProcessor2_0, of SD3, and HunyuanVideo15AttnProcessor2_0: attends over image tokens, and text
    tokens after them where there are any, of which a mask may hide some as keys.

    diffusers also masks the keys of hidden queries, by a mask of all pairs of tokens. Nothing reads those outputs, so a
    mask of keys suffices."""

    def __call__(
        self, attn: Attention, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None, image_rotary_emb: Any = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        query, key, value = _heads(attn, hidden_states, (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k))
        if image_rotary_emb is not None:
            rotate: Any = partial(apply_rotary_emb, freqs_cis=image_rotary_emb, sequence_dim=1)
            query, key = rotate(query), rotate(key)
        if encoder_hidden_states is None:
            return _out(attn, self._attend(query, key, value))
        projections = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
        text = _heads(attn, encoder_hidden_states, projections, (attn.norm_added_q, attn.norm_added_k))
        pairs = zip((query, key, value), text, strict=True)
        image_tokens, text_tokens = hidden_states.shape[1], encoder_hidden_states.shape[1]
        mask = None
        if attention_mask is not None:
            mask = nn.functional.pad(attention_mask.bool(), (image_tokens, 0), value=True)[:, None, None, :]
        out = self._attend(*(torch.cat(pair, dim=1) for pair in pairs), attn_mask=mask)
        of_image, of_text = out.split([image_tokens, text_tokens], dim=1)
        return _out(attn, of_image), of_text if attn.context_pre_only else attn.to_add_out(of_text)


class GroupedAttention(Aware):
    """Replaces Lumina2AttnProcessor2_0: self-attention with rotary positions, several query heads to a key head."""

    def __call__(
        self, attn: Attention, hidden_states: Tensor, encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None, image_rotary_emb: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        assert encoder_hidden_states is hidden_states
        projections = (attn.to_q, attn.to_k, attn.to_v)
        query, key, value = _heads(attn, hidden_states, projections, (attn.norm_q, attn.norm_k))
        if image_rotary_emb is not None:
            rotate: Any = partial(apply_rotary_emb, freqs_cis=image_rotary_emb, use_real=False)
            query, key = rotate(query), rotate(key)
        query, key = query.to(value.dtype), key.to(value.dtype)
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None, :]
        grouped = key.shape[2] != query.shape[2]
        return _out(attn, self._attend(query, key, value, attn_mask=mask, scale=attn.scale, enable_gqa=grouped))


def _heads(attn: Attention, tokens: Tensor, projections: Iterable[Any], norms: Iterable[Any]) -> list[Tensor]:
    """Returns query, key and value of `tokens`, [B, tokens, heads, head size], normed where there are norms."""
    size = attn.inner_dim // attn.heads
    query, key, value = (project(tokens).unflatten(-1, (-1, size)) for project in projections)
    return [*(x if norm is None else norm(x) for x, norm in zip((query, key), norms, strict=True)), value]


def _out(attn: Attention, tokens: Tensor) -> Tensor:
    projection, dropout = attn.to_out
    return dropout(projection(tokens))


_REPLACEMENTS: dict[type, type] = {
    HunyuanVideo15AttnProcessor2_0: JointAttention,
    JointAttnProcessor2_0: JointAttention,
    Lumina2AttnProcessor2_0: GroupedAttention,
}
