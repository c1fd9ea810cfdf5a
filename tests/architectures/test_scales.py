"""Layers that quantise their input by the largest of all tokens do so too when a rank holds some of them."""

from __future__ import annotations

import pytest

from ..engine.conftest import Groups


@pytest.mark.parametrize(
    ("ring", "ulysses", "smooth", "fused"), [(3, 1, False, False), (1, 2, True, False), (1, 2, False, True)]
)
def test_nvfp4_does_not_depend_on_the_cut(networks: Groups, ring: int, ulysses: int, smooth: bool, fused: bool) -> None:
    case = dict(ring=ring, ulysses=ulysses, smooth=smooth, fused=fused)
    for answer in networks(ring * ulysses).run("tests.architectures.scale_cases:parity", **case):
        assert answer["rounded"] > 1e-2, "nothing was multiplied in nvfp4"
        assert answer["error"] <= 5e-3
        assert not answer["left"]


def test_where_a_card_multiplies_no_nvfp4_none_does(networks: Groups) -> None:
    """Else the others would wait for its largest input, which it never asks for."""
    for answer in networks(2).run("tests.architectures.scale_cases:unlike"):
        assert answer["error"] <= 1e-5
        assert answer["kept"], "alone each card does what it can"
