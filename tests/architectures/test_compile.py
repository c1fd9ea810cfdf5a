"""ComfyUI's networks with compiled blocks compute the same on several ranks, in as few graphs as undivided."""

from __future__ import annotations

import pytest

from ..engine.conftest import Groups
from ..zoo.calls import CASES

BREAKS = (  # these run outside of graphs:
    "ace-step",  # sums over tokens, and convolutions along them
    "humo",  # padding of tokens to full frames
)


@pytest.mark.sweep(one_in=80)
@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)], ids=str)
def test_what_is_cut_breaks_no_graph(networks: Groups, case: str, degrees: tuple[int, int]) -> None:
    ring, ulysses = degrees
    call = {"name": case, "ring": ring, "ulysses": ulysses, "backend": "eager"}
    for answer in networks(2).run("tests.architectures.compile_cases:compiled", **call):
        assert answer["error"] <= 1e-5
        assert answer["left"] == 0.0
        if case in BREAKS:
            continue
        assert answer["together"]["breaks"] <= answer["alone"]["breaks"]
        assert answer["together"]["given up"] <= answer["alone"]["given up"]
        assert answer["together"]["graphs"] <= answer["alone"]["graphs"], "each block is a graph of its own"
