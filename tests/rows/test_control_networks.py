"""A ControlNet that is divided like its UNet computes what it does on one rank, and the UNet answers the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ..engine.conftest import Groups
from .conftest import CONTROL_CASES as CASES
from .test_unets import BAR, DIVISIONS

SIZES = [(33, 20, 2, 2), (20, 37, 2, 1), (32, 32, 1, 1)]
SMALL = [(17, 10, 2, 1)]
NAMES = ("SD1.5", "SD2, 3 heads", "SDXL", "Control-LoRA", "resblock_updown", "union")


def check(unets: Groups, name: str, division: str, sizes: Sequence[tuple[int, ...]] = SIZES, **more: object) -> None:
    ring, ulysses = DIVISIONS[division]
    given = {"name": name, "ring": ring, "ulysses": ulysses, "sizes": sizes, **more}
    for of_rank in unets(ring * ulysses).run(f"{CASES}:apart", **given):
        for size, error in zip(sizes, of_rank, strict=True):
            assert error["error"] <= BAR * error["floor"], (size, error)
            assert error["answer"] <= 2e-5, (size, error)
            assert error["does"] > 1e-2, (size, error)
            assert not error["left"], "undivide leaves something behind"


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.sweep(one_in=2)
def test_sdxls_is_the_same_by_rows_and_columns_at_odd_sizes(unets: Groups, division: str) -> None:
    check(unets, "SDXL", division)


@pytest.mark.sweep(one_in=18)
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("name", NAMES)
def test_all_of_them_are(unets: Groups, name: str, division: str) -> None:
    sizes = {"union": SMALL, "resblock_updown": [(40, 64, 1, 1)]}
    check(unets, name, division, sizes.get(name, SIZES[:2]))


@pytest.mark.parametrize("shares", [(3, 1), (2, 5, 3)], ids=str)
def test_shares_need_not_be_equal(unets: Groups, shares: tuple[int, ...]) -> None:
    for name, sizes in (("SDXL", SIZES[:1]), ("union", SMALL)):
        check(unets, name, f"ring {len(shares)}", sizes, shares=shares)


def test_a_latent_of_too_few_rows_is_computed_whole_on_every_rank(unets: Groups) -> None:
    sizes = [(8, 8, 1, 1)]
    for (error,) in unets(2).run(f"{CASES}:apart", name="SD1.5", ring=2, ulysses=1, sizes=sizes):
        assert error["from plain"] == error["answer"] == 0.0


def test_a_unet_that_is_computed_whole_for_a_patch_is_given_whole_residuals(unets: Groups) -> None:
    for error in unets(2).run(f"{CASES}:patched", ring=2, ulysses=1, size=(33, 40, 1, 1)):
        assert error["does"] > 1e-2
        assert error["error"] <= 2e-5
