"""The numbers of docs/mechanisms are those of the code."""

from __future__ import annotations

import math

import pytest
import torch

from parallel_runtime.engine.attention.ring_and_ulysses import Merge
from parallel_runtime.engine.comm.mesh import MeshDim
from parallel_runtime.engine.rows.levels import levels_of
from parallel_runtime.engine.split.streams import chunk_sizes


def test_two_ranks_have_seven_and_five_tokens_and_two_heads_and_one() -> None:
    text, image, heads = chunk_sizes(3, 2), chunk_sizes(9, 2), chunk_sizes(3, 2)
    assert (image, heads) == ((5, 4), (2, 1))
    assert [sum(part) for part in zip(text, image, strict=True)] == [7, 5]


def test_two_blocks_of_a_ring_merge_to_the_attention_over_all_four_keys() -> None:
    merge = Merge(in_float32=True)
    for out, total in ((17.5, 4.0), (20.0, 12.0)):
        merge.add(torch.tensor(out).view(1, 1, 1, 1), torch.tensor(math.log(total)).view(1, 1, 1, 1))
    assert merge.result(torch.zeros(1, 1, 1, 1), None).item() == pytest.approx(19.375)


def test_eleven_rows_are_dealt_out_by_the_last_level() -> None:
    levels = levels_of(torch.Size([1, 4, 11, 5]), 2, MeshDim(size=2, index=0))
    assert levels is not None
    assert levels.sizes == ((8, 3), (4, 2), (2, 1))
