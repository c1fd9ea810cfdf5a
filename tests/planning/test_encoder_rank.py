"""A text encoder goes, whole, where it fits without pushing out a network, if there is such a worker."""

from __future__ import annotations

import pytest

from parallel_runtime.errors import Refused
from parallel_runtime.planning.encoder_rank import encoder_rank

GIB = 1 << 30


def test_it_goes_where_the_most_room_is_beside_the_network() -> None:
    assert encoder_rank(5 * GIB, [3 * GIB, 7 * GIB, 6 * GIB], [20 * GIB] * 3) == 1


def test_of_equal_workers_the_first_has_it() -> None:
    assert encoder_rank(5 * GIB, [7 * GIB, 7 * GIB], [20 * GIB] * 2) == 0
    assert encoder_rank(5 * GIB, [None, None], [None, None]) == 0


def test_a_worker_without_a_limit_has_the_most_room() -> None:
    assert encoder_rank(5 * GIB, [7 * GIB, None], [20 * GIB, None]) == 1


def test_where_it_fits_beside_nothing_the_network_makes_room_on_the_largest_worker() -> None:
    assert encoder_rank(15 * GIB, [3 * GIB, 7 * GIB], [24 * GIB, 16 * GIB]) == 0


def test_what_fits_nowhere_is_refused_with_both_sizes_and_the_limit() -> None:
    with pytest.raises(Refused, match=r"needs 45\.0 GiB.*more than 24\.0 GiB of its device \(CP_MEMORY_GIB says so\)"):
        encoder_rank(45 * GIB, [3 * GIB, 7 * GIB], [24 * GIB, 16 * GIB], "CP_MEMORY_GIB")
