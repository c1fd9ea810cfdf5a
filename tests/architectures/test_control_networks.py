"""A ControlNet whose tokens are divided gives each rank its part of every residual, and the network that they are added
to answers the same."""

from __future__ import annotations

import pytest

from ..engine.conftest import Groups

CASES = "tests.architectures.control_cases"
NAMES = (
    "flux xlabs", "flux union", "flux union, references", "flux inpaint", "flux mistoline", "qwen", "qwen fun", "sd3",
    "sd3.5 large", "sd3.5", "hunyuan dit",
)  # fmt: skip
EXACT = 1e-5


def check(networks: Groups, name: str, ring: int, ulysses: int, shares: tuple[int, ...] = ()) -> None:
    given = {"name": name, "ring": ring, "ulysses": ulysses, "shares": shares}
    by_rank = networks(ring * ulysses).run(f"{CASES}:apart", **given)
    for of_rank in by_rank:
        assert of_rank["residuals"] <= EXACT, of_rank
        assert of_rank["answer"] <= EXACT, of_rank
        assert of_rank["does"] > 1e-2, of_rank
        assert not of_rank["left"], "undivide leaves something behind"
    assert sum(of_rank["own"] for of_rank in by_rank) == by_rank[0]["all"], "each rank has its own tokens only"


@pytest.mark.parametrize("degrees", [(2, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sweep(one_in=3)
def test_it_is_the_same_on_several_ranks(networks: Groups, name: str, degrees: tuple[int, int]) -> None:
    check(networks, name, *degrees)


def test_shares_need_not_be_equal(networks: Groups) -> None:
    check(networks, "flux union", 3, 1, (2, 5, 3))
    check(networks, "flux union, references", 2, 1, (3, 1))


@pytest.mark.parametrize("name", ["flux union", "qwen", "qwen fun", "sd3", "sd3.5", "hunyuan dit"])
@pytest.mark.sweep(one_in=3)
def test_a_plan_that_lacks_a_word_is_refused(networks: Groups, name: str) -> None:
    for errors in networks(2).run(f"{CASES}:survivors", name=name):
        assert all(wrong <= EXACT for wrong in errors.values()), errors
