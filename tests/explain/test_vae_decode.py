"""What CP Plan says of a decode: what more workers divide and what they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallel_runtime.architectures.autoencoders import COMPARED, MINIMAX_H3, TileGrid
from parallel_runtime.explain.plan_words import COUNTED, Decode, decode_line, decode_seconds
from parallel_runtime.planning.run_plan import DeviceProfile

FAST = DeviceProfile(bytes_per_second=2e10, flops_per_second=6e13)
WAN_720P = Decode(
    kind=next(kind for kind in COMPARED if "wan.vae.WanVAE" in kind),
    latent=(1, 16, 21, 90, 160),
    weight_bytes=250 << 20,
    activation_bytes=8 << 30,
    item_bytes=2,
)

MINIMAX_768P = Decode(
    kind=MINIMAX_H3,
    latent=(1, 24, 37, 48, 84),
    weight_bytes=5 << 30,
    activation_bytes=2 << 30,
    item_bytes=2,
    grid=TileGrid(count=196, tile=(7, 16, 16), frames=124),
    tile_bytes=1 << 29,
)


def seconds(decode: Decode, workers: int, link: DeviceProfile = FAST) -> float:
    estimate = decode_seconds(decode, workers, link)
    assert estimate is not None
    return estimate


def test_every_class_that_is_counted_may_be_divided() -> None:
    assert {kind for kind, _ in COUNTED} <= COMPARED.keys()


def test_workers_divide_the_work_but_for_latencies_and_launches() -> None:
    alone = seconds(WAN_720P, 1)
    assert 9 < alone < 13, "626 TFLOP at 60 TFLOP/s"
    assert 1.9 < alone / seconds(WAN_720P, 2) <= 2
    assert 3.5 < alone / seconds(WAN_720P, 4) < 4
    faster = replace(FAST, flops_per_second=1e15)
    assert seconds(WAN_720P, 1, faster) / seconds(WAN_720P, 8, faster) < 5, "launches stay"


def test_tiles_are_dealt_out_whole() -> None:
    alone = seconds(MINIMAX_768P, 1)
    assert 29 < alone < 34, "196 tiles of 9.66 TFLOP at 60 TFLOP/s"
    assert 3.9 < alone / seconds(MINIMAX_768P, 4) < 4
    assert 4.8 < alone / seconds(MINIMAX_768P, 5) < 4.9, "one worker has 40 of 196"
    assert seconds(MINIMAX_768P, 4, replace(FAST, bytes_per_second=1e8)) > 1.5 * seconds(MINIMAX_768P, 4)
    assert seconds(replace(MINIMAX_768P, latent=(2, 24, 37, 48, 84)), 1) == 2 * alone


def test_of_tiles_the_first_worker_has_the_whole_picture() -> None:
    line = decode_line(MINIMAX_768P, 4, FAST)[0]
    assert "about 2.00 GiB in ComfyUI's process beside 5.00 of weights" in line
    assert "as much on the first of 4 worker(s)" in line
    assert "0.50 on each other" in line
    assert (
        "of 3 worker(s)"
        in decode_line(replace(MINIMAX_768P, grid=TileGrid(count=3, tile=(7, 9, 9), frames=5)), 8, FAST)[0]
    )


def test_a_slow_link_is_not_hidden() -> None:
    assert seconds(WAN_720P, 4, replace(FAST, bytes_per_second=1e8)) > seconds(WAN_720P, 1) / 2


def test_no_more_workers_are_counted_than_there_are_rows() -> None:
    small = replace(WAN_720P, latent=(1, 16, 21, 2, 3))
    assert seconds(small, 8) == seconds(small, 3)
    assert "on each of 3 worker(s)" in decode_line(small, 8, FAST)[0]


def test_the_line_names_memory_here_and_divided_and_seconds_where_they_are_known() -> None:
    line = " ".join(decode_line(WAN_720P, 4, FAST))
    assert "8.00 GiB in ComfyUI's process" in line
    assert "2.00 on each of 4 worker(s)" in line
    assert " s on one device, " in line
    assert len(decode_line(WAN_720P, 4, None)) == 1
    assert len(decode_line(replace(WAN_720P, kind="unknown"), 4, FAST)) == 1


@pytest.mark.parametrize("dims", [4, 5])
def test_pictures_and_videos_of_one_class_are_counted_apart(dims: int) -> None:
    kind = next(kind for kind, count in COUNTED if count == 5 and "AutoencoderKL" in kind)
    latent = (1, 16, 90, 160) if dims == 4 else (1, 16, 1, 90, 160)
    assert decode_seconds(replace(WAN_720P, kind=kind, latent=latent), 1, FAST)
