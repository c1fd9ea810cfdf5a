"""Networks of convolutions, each rank with its rows, are what they are on one rank; what is not is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from parallel_runtime.engine.comm.mesh import MeshDim
from parallel_runtime.engine.rows.conversion import HANDLERS, error_limit
from parallel_runtime.engine.rows.functions import RowFunctions, Share
from parallel_runtime.errors import Refused

from .conftest import Groups
from .row_cases import NETS

BAR = 2e-6
CASES = "tests.engine.row_cases"
SIZES = [(2, 7), (3, 7), (3, 3), (4, 9)]  # ranks, and the rows that they share


@pytest.mark.parametrize(("world", "rows"), SIZES, ids=str)
@pytest.mark.parametrize("net", NETS)
def test_divided_is_the_same(groups: Groups, net: str, world: int, rows: int) -> None:
    for dim in (-2, -1):
        assert max(groups(world).run(f"{CASES}:apart", net=net, dim=dim, rows=rows)) <= BAR


@pytest.mark.parametrize("shares", [(1, 4, 2), (5, 0, 3), (0, 1, 12)], ids=str)
@pytest.mark.parametrize("net", NETS)
def test_rows_by_shares_are_the_same(groups: Groups, net: str, shares: tuple[int, ...]) -> None:
    for dim in (-2, -1):
        assert max(groups(3).run(f"{CASES}:apart", net=net, dim=dim, rows=13, shares=shares)) <= BAR


@pytest.mark.parametrize(("world", "rows"), SIZES, ids=str)
def test_attention_sees_all_rows(groups: Groups, world: int, rows: int) -> None:
    assert max(groups(world).run(f"{CASES}:attention_apart", rows=rows)) <= BAR


def test_ranks_are_asked_equally_often_however_many_rows_they_have(groups: Groups) -> None:
    assert len(set(groups(3).run(f"{CASES}:ticks"))) == 1


@pytest.mark.parametrize("world", [2, 3])
def test_the_self_test_finds_what_the_mode_does_not_see(groups: Groups, world: int) -> None:
    assert max(groups(world).run(f"{CASES}:tried", broken=False, dim=-2)) < 1e-5
    assert min(groups(world).run(f"{CASES}:tried", broken=True, dim=-2)) > 10 * error_limit(torch.bfloat16)


X, W = torch.randn(1, 32, 4, 5), torch.randn(8, 32, 3, 3)
REFUSED: dict[str, Callable[[], object]] = {
    "mean over": lambda: X.mean((2, 3)),
    "softmax over": lambda: F.softmax(X, 2),
    "instance_norm": lambda: F.instance_norm(X),
    "interpolation": lambda: F.interpolate(X, scale_factor=2.0, mode="bilinear"),
    "unfold": lambda: F.unfold(X, 2),
    "attention": lambda: F.scaled_dot_product_attention(*[X.flatten(2).transpose(1, 2)] * 3),
    "a convolution .* makes": lambda: F.conv2d(X, W),
    "padding 'same'": lambda: F.conv2d(X, W, padding="same"),
    "transposed": lambda: F.conv_transpose2d(X, torch.randn(32, 8, 4, 4), stride=2, padding=1),
    "max_pool2d": lambda: F.max_pool2d(X, 2),
    "pooling": lambda: F.avg_pool2d(X, 3, 1),
    "flip": lambda: X.flip(-2),
    "circular": lambda: F.pad(X, (1, 1, 1, 1), mode="circular"),
    "padding .0, 0, -1, 0.": lambda: F.pad(X, (0, 0, -1, 0)),
    "randn of": lambda: torch.randn(1, 3, 5, 5),
    "fft": lambda: torch.fft.fft2(X),
}


@pytest.mark.parametrize(("says", "run"), REFUSED.items(), ids=REFUSED)
def test_what_looks_across_a_cut_in_another_way_is_refused_by_name(says: str, run: Callable[[], object]) -> None:
    share = Share(ranks=MeshDim(size=2, index=0, ranks=(0, 1)), dim=-2, units=(4, 4))
    with pytest.raises(Refused, match=says), RowFunctions(share, HANDLERS):
        run()
