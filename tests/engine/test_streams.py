"""The arithmetic that every rank does alone."""

from __future__ import annotations

import pytest
import torch

from parallel_runtime.specs import Parallelism
from parallel_runtime.worker.engine.attention import ContextAttention
from parallel_runtime.worker.engine.mesh import Axis, ContextMesh
from parallel_runtime.worker.engine.streams import Streams, chunk_range, chunk_sizes


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_chunks_cover_everything_and_differ_by_at_most_one(parts: int) -> None:
    for total in range(40):
        sizes = chunk_sizes(total, parts)
        assert len(sizes) == parts
        assert sum(sizes) == total
        assert max(sizes) - min(sizes) <= 1
        assert [chunk_range(total, parts, index)[1] for index in range(parts)] == list(sizes)
        ends = [sum(chunk_range(total, parts, index)) for index in range(parts)]
        assert [chunk_range(total, parts, index)[0] for index in range(parts)] == [0, *ends[:-1]]


def test_more_ranks_than_tokens_leaves_ranks_without() -> None:
    assert chunk_sizes(2, 4) == (1, 1, 0, 0)


def test_streams_spread_together_rank_by_rank() -> None:
    streams = Streams(Axis(size=3))
    streams.see("text", 2, "here")
    streams.see("image", 7, "there")
    assert streams.spread(("text", "image")) == (4, 3, 2)


def test_a_stream_has_one_length_until_the_next_forward() -> None:
    streams = Streams(Axis(size=2))
    streams.see("text", 7, "first")
    with pytest.raises(ValueError, match="second has 8 tokens, but stream 'text' was cut with 7"):
        streams.see("text", 8, "second")
    streams.clear()
    streams.see("text", 8, "second")


def test_a_stream_that_was_never_cut_has_no_length() -> None:
    with pytest.raises(ValueError, match="'audio' is used before the plan cut it"):
        Streams(Axis(size=2)).length("audio")


def test_kernels_of_a_ring_race_with_all_heads_however_much_there_is_to_send() -> None:
    axis = Axis(size=2)
    streams = Streams(axis)
    streams.see("image", 2 * 8192, "here")
    attention = ContextAttention(ContextMesh(ring=axis, context=axis), Parallelism(ring_degree=2), streams, ("image",))
    tokens = torch.empty(1, 8192, 24, 128, device="meta")
    assert attention._arrange(tokens, tokens).largest.heads == 24
