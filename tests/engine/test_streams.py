"""The arithmetic that every rank does alone."""

from __future__ import annotations

import pytest

from parallel_runtime.engine.comm.mesh import MeshDim
from parallel_runtime.engine.split.streams import Streams, chunk_range, chunk_sizes


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
    streams = Streams(MeshDim(size=3))
    streams.record_length("text", 2, "here")
    streams.record_length("image", 7, "there")
    assert streams.tokens_by_rank(("text", "image")) == (4, 3, 2)


def test_a_stream_has_one_length_until_the_next_forward() -> None:
    streams = Streams(MeshDim(size=2))
    streams.record_length("text", 7, "first")
    with pytest.raises(ValueError, match="second has 8 tokens, but stream 'text' was split with 7"):
        streams.record_length("text", 8, "second")
    streams.clear()
    streams.record_length("text", 8, "second")


def test_a_stream_that_was_never_cut_has_no_length() -> None:
    with pytest.raises(ValueError, match="'audio' is used before the plan split it"):
        Streams(MeshDim(size=2)).length("audio")
