"""The stages of Stable Cascade whose rows are divided over ranks compute what they do on one."""

from __future__ import annotations

from typing import Any

import pytest

from ..engine.conftest import Groups
from .conftest import CASCADE_CASES as CASES
from .test_unets import DIVISIONS

BAR = 1e-5
SIZES = {"stage C": [(13, 9, 2), (8, 15, 1)], "stage B": [(48, 16, 2), (24, 40, 1)]}


def run(unets: Groups, name: str, division: str, sizes: list[tuple[int, ...]], **more: Any) -> list[dict[str, float]]:
    ring, ulysses = DIVISIONS[division]
    given = {"name": name, "ring": ring, "ulysses": ulysses, "sizes": sizes, **more}
    return [each for rank in unets(ring * ulysses).run(f"{CASES}:apart", **given) for each in rank]


def check(unets: Groups, name: str, division: str, **more: Any) -> None:
    for error in run(unets, name, division, SIZES[name], **more):
        assert 0 < error["apart"] <= BAR  # no bit alike: it is divided
        assert not error["left"], "undivide leaves something behind"


@pytest.mark.sweep(one_in=4)
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("name", SIZES)
def test_it_is_the_same_by_rows_and_columns(unets: Groups, name: str, division: str) -> None:
    check(unets, name, division)


def test_shares_need_not_be_equal(unets: Groups) -> None:
    check(unets, "stage B", "ring 2", shares=(2, 1))


def test_tokens_may_be_collected_before_keys_are_made_of_them(unets: Groups) -> None:
    check(unets, "stage B", "ring 2", rotate_method="tokens")


def test_residuals_are_resized_and_split(unets: Groups) -> None:
    check(unets, "stage C", "ring 2", more={"control": True})


@pytest.mark.parametrize(
    ("size", "more"), [((26, 16, 1), {}), ((24, 16, 1), {"pixels": True})], ids=["uneven levels", "pixels"]
)
def test_what_no_rank_can_resize_alone_is_computed_whole(
    unets: Groups, size: tuple[int, ...], more: dict[str, bool]
) -> None:
    """13 rows of patches have 6 below them, and the network stretches these to 13 on their way up."""
    for error in run(unets, "stage B", "ring 2", [size], more=more):
        assert error["apart"] == 0
