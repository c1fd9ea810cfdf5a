"""What travels is packed in few dims: CUDA's `cat` is one kernel for at most 4, and a copy for each tensor above."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_runtime.engine.attention import ring_and_ulysses
from parallel_runtime.engine.comm import collectives
from parallel_runtime.engine.comm.mesh import MeshDim
from parallel_runtime.engine.split.streams import Streams, chunk_range, chunk_sizes

HEADS, DIM, TOKENS = 12, 8, (5, 7, 5)
LAYOUTS = ("tokens first", "heads first", "in one", "mixed")
EVEN = (1, 1, 1)
UNEVEN = (2, 1, 1)


class Packing(TorchDispatchMode):
    """The dims of each `cat`, and the names of what else writes."""

    def __init__(self) -> None:
        super().__init__()
        self.dims: list[int] = []
        self.others: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function.overloadpacket is torch.ops.aten.cat:
            self.dims.append(max(out.ndim, *(tensor.ndim for tensor in args[0])))
        elif function.overloadpacket in (torch.ops.aten.copy_, torch.ops.aten.clone, torch.ops.aten.stack):
            self.others.append(str(function))
        return out


def laid_out(layout: str, batch: int, tokens: int) -> list[Tensor]:
    """Queries, keys and values [B, tokens, H, D], as networks give them."""
    made = torch.randn(3, batch, tokens, HEADS, DIM, generator=torch.Generator().manual_seed(0))
    if layout == "in one":
        made = made.permute(1, 2, 0, 3, 4).contiguous().permute(2, 0, 1, 3, 4)
    turned = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in made]
    return {"heads first": turned, "mixed": [turned[0], *made[1:]]}.get(layout, [*made])


def expected(tensors: Sequence[Tensor], parts: tuple[int, ...], chunk: int, chunks: int) -> Tensor:
    """For each rank, of each token, the heads of each tensor that the rank attends with in this chunk."""
    pieces, first = [], 0
    for own in chunk_sizes(HEADS, parts):
        start, count = chunk_range(own, chunks, chunk)
        chosen = [tensor[:, :, first + start : first + start + count].transpose(0, 1) for tensor in tensors]
        pieces.append(torch.cat(chosen, 2).flatten())
        first += own
    return torch.cat(pieces)


@pytest.mark.parametrize("chunk", [0, 1])
@pytest.mark.parametrize("parts", [EVEN, UNEVEN], ids=["even", "uneven"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_are_packed_by_one_cat_of_at_most_four_dims(
    monkeypatch: pytest.MonkeyPatch, layout: str, batch: int, parts: tuple[int, ...], chunk: int
) -> None:
    monkeypatch.setattr(ring_and_ulysses.collectives, "all_to_all", lambda send, *_: send)
    monkeypatch.setattr(collectives, "zeros", lambda shape, **options: torch.full(shape, torch.nan, **options))
    tensors = laid_out(layout, batch, TOKENS[1])
    packed = ring_and_ulysses.all_to_all_layout((HEADS,) * 3, parts, TOKENS, 1, batch, DIM, chunk, 2)
    with Packing() as seen:
        send: Any = ring_and_ulysses.to_heads(tensors, packed, MeshDim(), Streams(MeshDim()), "queries")
    assert torch.equal(send, expected(tensors, parts, chunk, 2))
    joined = layout in ("tokens first", "in one")
    assert set(seen.dims) == {batch + 2 if joined else 4}
    assert len(seen.dims) == len(packed.runs[0]) * (1 if joined else batch)
    assert seen.others == []


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_that_come_back_are_in_their_places(layout: str, batch: int) -> None:
    want, *_ = laid_out(layout, batch, TOKENS[1])
    out = torch.empty_like(want)
    for chunk in (0, 1):
        back = ring_and_ulysses.all_to_all_layout((HEADS,), UNEVEN, TOKENS, 1, batch, DIM, chunk, 2)
        ring_and_ulysses.write_returned(expected([want], UNEVEN, chunk, 2), back, out)
    assert torch.equal(out, want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_a_ring_are_packed_by_one_cat_of_four_dims(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    sent: list[Tensor] = []
    monkeypatch.setattr(ring_and_ulysses.collectives, "ring_send_recv", lambda block, *_: sent.append(block))

    def gather(packed: Tensor, *_: Any) -> SimpleNamespace:
        sent.append(packed)
        return SimpleNamespace(wait=lambda: [packed])

    monkeypatch.setattr(ring_and_ulysses.collectives, "start_all_gather", gather)
    key, value, _ = laid_out(layout, 2, 7)
    mesh_dim = MeshDim(size=2, index=0, ranks=(0, 1))
    with Packing() as seen:
        next(ring_and_ulysses.rotate((key, value), (7, 7), mesh_dim))
        _, (_, (keys, values)) = ring_and_ulysses.all_gather_blocks((key, value), (7, 7), mesh_dim)
    assert torch.equal(sent[0], torch.stack([key, value]))
    assert (torch.equal(keys, key), torch.equal(values, value)) == (True, True)
    assert (seen.dims, seen.others) == ([4, 4], [])
