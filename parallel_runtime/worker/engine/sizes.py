"""How many tokens or heads each rank holds: pure functions of a global count, so that no size is ever sent."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=4096)
def chunk_sizes(total: int, parts: int) -> tuple[int, ...]:
    """Sizes of `parts` contiguous chunks of `total` items that differ by at most one, larger ones first.

    A chunk is empty where there are more parts than items.
    """
    assert total >= 0
    assert parts >= 1
    base, extra = divmod(total, parts)
    return (base + 1,) * extra + (base,) * (parts - extra)


@lru_cache(maxsize=4096)
def chunk_range(total: int, parts: int, index: int) -> tuple[int, int]:
    """(start, size) of chunk `index` among the chunks of `chunk_sizes`."""
    sizes = chunk_sizes(total, parts)
    return sum(sizes[:index]), sizes[index]
