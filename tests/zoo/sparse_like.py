"""Block-sparse attention with the habits of ComfyUI's node for it (comfy_extras/nodes_sparse_attention.py, after
v0.33): an override of every attention, and replaced blocks that project queries, keys and values by themselves. None of
its code is here. `installed` makes it ComfyUI's module.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BLOCK, CHUNK = 4, 5


def installed() -> Any:
    """This file as the module that ComfyUI would have imported under the path of its node's file."""
    import comfy.options

    root = os.path.dirname(os.path.dirname(os.path.realpath(inspect.getfile(comfy.options))))
    name = os.path.join(root, "comfy_extras", "nodes_sparse_attention")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, __file__)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def sparse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each block of queries attends to the half of the blocks of keys whose means it likes best, head by head; tensors
    are [batch, tokens, heads, head size]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    tokens = q.shape[2]
    number = torch.arange(tokens) // BLOCK
    member = torch.nn.functional.one_hot(number).to(q)
    means = [member.T @ x / member.sum(0)[:, None] for x in (q, k)]
    liked = means[0] @ means[1].transpose(2, 3)
    chosen = liked >= liked.topk(-(-liked.shape[-1] // 2), -1).values[..., -1:]
    hidden = ~chosen[:, :, number][..., number]
    scores = (q @ k.transpose(2, 3) * q.shape[-1] ** -0.5).masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2)


class SparseAttnPatch:
    def __init__(self, vsa: bool = False, dense_blocks: tuple[int, ...] = ()) -> None:
        self.vsa, self.dense_blocks = vsa, set(dense_blocks)
        self.installed: set[Any] = set()
        self.reset()

    def reset(self) -> None:
        self.pooled: dict[Any, Tensor] = {}
        self.vsa_plans: dict[Any, Any] = {}
        self.vsa_rope: Any = None
        self._logged: set[str] = set()
        self.calls = 0


def make_attention_override(patch: SparseAttnPatch, previous: Any) -> Callable[..., Tensor]:
    def override(func: Any, q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Any = None, **kwargs: Any) -> Tensor:
        options = kwargs.get("transformer_options") or {}
        if mask is not None or patch.vsa or q.shape != k.shape or options.get("block_index") in patch.dense_blocks:
            inner = func if previous is None else previous
            return inner(*((func,) if previous else ()), q, k, v, heads, mask=mask, **kwargs)
        patch.calls += 1
        if kwargs.get("skip_reshape"):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        else:
            q, k, v = (x.unflatten(2, (heads, -1)) for x in (q, k, v))
        return sparse(q, k, v).flatten(2)

    return override


def install_override(patch: SparseAttnPatch, options: dict[str, Any]) -> None:
    current = options.get("optimized_attention_override")
    if current not in patch.installed:
        made = make_attention_override(patch, current)
        patch.installed.add(made)
        options["optimized_attention_override"] = made


def h3_attention(attn: Any, x: Tensor, rope_freqs: Tensor, patch: SparseAttnPatch, index: int) -> Tensor:
    """Rows of all tokens, in another order and padded for `vsa`, are projected in chunks."""
    count, heads, size = x.shape[0], attn.heads, attn.head_dim
    assert rope_freqs.shape[1] == count, "the table of rotations is a part"
    order = torch.arange(count).flip(0) if patch.vsa else torch.arange(count)
    rows = torch.cat([x[order], x.new_zeros(-count % BLOCK, x.shape[1])]) if patch.vsa else x
    made = torch.cat([attn.qkv_proj(rows[at : at + CHUNK]) for at in range(0, len(rows), CHUNK)])
    q, k, v = (part.unflatten(1, (heads, size))[None] for part in made.chunk(3, 1))
    turned = torch.cat([rope_freqs[0, order], rope_freqs.new_zeros(len(rows) - count, rope_freqs.shape[2])])
    q, k = (attn.q_norm(each) + turned[None, :, None] for each in (q, k))
    patch.pooled[index] = k.mean(1)
    out = sparse(q, k, v)
    if patch.vsa:
        out = out * attn.to_gate_compress(rows).unflatten(1, (heads, size)).sigmoid()
        out = out[:, :count].flip(1)
    patch.calls += 1
    return attn.out_proj(out[0].flatten(1))


def make_h3_block_patch(block: Any, block_index: int, patch: SparseAttnPatch) -> Callable[..., Any]:
    def attention(h: Tensor, rope_freqs: Any = None, transformer_options: Any = None) -> Tensor:
        return h3_attention(block.attn, h, rope_freqs, patch, block_index)

    def block_patch(args: dict[str, Any], extra: dict[str, Any]) -> Any:
        if block_index not in patch.dense_blocks:
            args = {**args, "attention": attention}
        return extra["original_block"](args)

    return block_patch


def options_for(network: Any, vsa: bool = False, dense_blocks: tuple[int, ...] = ()) -> dict[str, Any]:
    """What the node puts into transformer_options; with `vsa` and for MiniMax H3 also replaced blocks."""
    module = installed()
    patch, options = module.SparseAttnPatch(vsa, dense_blocks), dict[str, Any]()
    module.install_override(patch, options)
    if type(network).__qualname__ == "MiniMaxH3Model":
        replaced = {("double_block", i): module.make_h3_block_patch(block, i, patch)
                    for i, block in enumerate(network.blocks)}  # fmt: skip
        options["patches_replace"] = {"dit": replaced}
    return options
