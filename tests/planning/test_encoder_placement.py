"""A text encoder goes, whole, where it fits without pushing out a network, if there is such a worker; else in stages,
else blocks are fetched."""

from __future__ import annotations

import itertools

import pytest

from parallel_runtime.errors import Refused
from parallel_runtime.planning.resolve import EncoderPlacement, EncoderSize, place_encoder

GIB = 1 << 30
MIB = 1 << 20


def whole(gib: int) -> EncoderSize:
    return EncoderSize(other=gib * GIB)


def blocks(number: int, mib: int = 1024, *, layer: int = 0, other: int = 0, workspace: int = 0) -> EncoderSize:
    layers = (layer * MIB,) if layer else ()
    return EncoderSize(layers=layers, blocks=(mib * MIB,) * number, other=other * MIB, workspace=workspace * MIB)


def rank_of(placement: EncoderPlacement) -> int:
    assert not placement.stages
    assert placement.weights.mode == "replicate"
    (rank,) = placement.ranks
    return rank


def test_it_goes_where_the_most_room_is_beside_the_network() -> None:
    assert rank_of(place_encoder(whole(5), [3 * GIB, 7 * GIB, 6 * GIB], [20 * GIB] * 3)) == 1


def test_of_equal_workers_the_first_has_it() -> None:
    assert rank_of(place_encoder(blocks(5), [7 * GIB, 7 * GIB], [20 * GIB] * 2)) == 0
    assert rank_of(place_encoder(blocks(5), [None, None], [None, None])) == 0


def test_a_worker_without_a_limit_has_the_most_room() -> None:
    assert rank_of(place_encoder(blocks(5), [7 * GIB, None], [20 * GIB, None])) == 1


def test_where_nothing_fits_beside_it_the_network_makes_room_on_the_largest_worker() -> None:
    assert rank_of(place_encoder(whole(15), [3 * GIB, 7 * GIB], [24 * GIB, 16 * GIB])) == 0


def test_what_fits_on_no_worker_is_in_stages_as_equal_as_the_room_allows() -> None:
    placement = place_encoder(blocks(12), [8 * GIB, 8 * GIB], [24 * GIB] * 2)
    assert (placement.ranks, placement.stages) == ((0, 1), (6, 6))
    assert placement.weight_bytes == (6 * GIB, 6 * GIB)
    placement = place_encoder(blocks(12), [9 * GIB, 4 * GIB], [24 * GIB] * 2)
    assert placement.stages == (8, 4)


def test_three_unequal_workers_have_stages_of_unequal_size_and_no_weight_is_in_two() -> None:
    size = blocks(12, layer=512, other=10, workspace=100)
    placement = place_encoder(size, [2 * GIB, 8 * GIB, 5 * GIB], [24 * GIB] * 3)
    assert placement.ranks == (1, 2) or len(placement.ranks) == 3
    assert sum(placement.stages) == 13
    assert sum(placement.weight_bytes) == size.weights + (len(placement.ranks) - 1) * size.other


def test_of_many_workers_the_fewest_with_the_most_room_share_it() -> None:
    placement = place_encoder(blocks(12), [1 * GIB, 7 * GIB, 2 * GIB, 7 * GIB], [24 * GIB] * 4)
    assert placement.ranks == (1, 3)


def test_the_network_stays_as_long_as_blocks_can_be_fetched_beside_it() -> None:
    placement = place_encoder(blocks(12), [5 * GIB, 1 * GIB], [24 * GIB] * 2)
    assert (placement.ranks, placement.weights.mode) == ((0,), "offload")
    assert placement.weights.resident_blocks == 3
    assert placement.weight_bytes[0] + placement.buffer_bytes <= 5 * GIB


def test_an_encoder_that_may_not_be_in_stages_is_offloaded() -> None:
    size = EncoderSize(blocks=(GIB,) * 12, staged=False)
    assert place_encoder(size, [8 * GIB, 8 * GIB], [8 * GIB] * 2).weights.mode == "offload"


def test_without_room_for_a_resident_block_large_layers_are_fetched_too() -> None:
    placement = place_encoder(blocks(12, layer=3072), [5 * GIB], [5 * GIB])
    assert placement.weights.resident_blocks == 0
    assert (placement.weight_bytes, placement.buffer_bytes) == ((0,), 5 * GIB)


def test_no_placement_exceeds_a_workers_room_at_any_size() -> None:
    sizes = [blocks(n, mib, layer=layer, other=5, workspace=50) for n, mib, layer in
             itertools.product((1, 3, 24, 40), (100, 700), (0, 1300))]  # fmt: skip
    rooms = [[2 * GIB, 9 * GIB], [6 * GIB, 6 * GIB, 1 * GIB], [300 * MIB], [12 * GIB] * 4]
    placed = 0
    for size, room in itertools.product(sizes, rooms):
        try:
            placement = place_encoder(size, room, room)
        except Refused:
            continue
        placed += 1
        for rank, weights in zip(placement.ranks, placement.weight_bytes, strict=True):
            assert weights + placement.buffer_bytes + size.workspace <= room[rank]
    assert placed > len(sizes)


def test_what_fits_nowhere_is_refused_with_both_sizes_and_the_limit() -> None:
    with pytest.raises(Refused, match=r"needs 45\.0 GiB.*more than 24\.0 GiB of its device \(CP_MEMORY_GIB says so\)"):
        place_encoder(whole(45), [3 * GIB, 7 * GIB], [24 * GIB, 16 * GIB], "CP_MEMORY_GIB")


def test_two_prompts_have_an_encoder_each_where_it_fits_beside_what_is_loaded() -> None:
    room = [6 * GIB, 7 * GIB, 3 * GIB]
    two = place_encoder(whole(5), room, [20 * GIB] * 3, prompts=2)
    assert (two.ranks, two.weight_bytes) == ((1, 0), (5 * GIB, 5 * GIB))
    assert place_encoder(whole(5), room, [20 * GIB] * 3, prompts=5).ranks == (1, 0), "no network makes room"
    assert rank_of(place_encoder(whole(6), [5 * GIB, 7 * GIB], [20 * GIB] * 2, prompts=2)) == 1
    assert rank_of(place_encoder(whole(15), [3 * GIB] * 2, [24 * GIB] * 2, prompts=2)) == 0
    assert place_encoder(blocks(12), [8 * GIB] * 2, [24 * GIB] * 2, prompts=2).stages
