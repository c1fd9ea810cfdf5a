"""Devices of several kinds may draw other random numbers: all ranks learn of it, so that all compare their latents."""

from __future__ import annotations

import pytest

from .conftest import Groups


@pytest.mark.parametrize(
    ("kinds", "unlike"), [(["A 132", "A 132"], False), (["A 132", "A 114"], True), (["A 132", "B 132"], True)]
)
def test_every_rank_knows_that_one_is_of_another_kind(groups: Groups, kinds: list[str], unlike: bool) -> None:
    assert groups(2).run("tests.engine.device_cases:unlike_kinds", kinds=kinds) == [unlike, unlike]
