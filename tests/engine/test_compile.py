"""torch.compile sees one operator where ranks attend together: blocks are one graph each, and as exact as eager."""

from __future__ import annotations

import pytest

from .conftest import Groups

CASES = "tests.engine.compile_cases"


@pytest.mark.parametrize("masked", [False, True])
def test_an_attention_over_ranks_breaks_no_graph(groups: Groups, masked: bool) -> None:
    for errors in groups(2).run(f"{CASES}:in_one_graph", degrees=(1, 2), masked=masked):
        assert max(errors) <= 1e-5


@pytest.mark.parametrize(("kind", "degrees"), [("flux", (2, 1)), ("wan", (1, 2))], ids=str)
def test_compiled_blocks_are_one_graph_each_and_exact(groups: Groups, kind: str, degrees: tuple[int, ...]) -> None:
    call = {"kind": kind, "degrees": degrees, "backend": "aot_eager"}
    assert max(max(errors) for errors in groups(2).run(f"{CASES}:compiled_error", **call)) <= 1e-5


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["flux", "qwen", "wan"])
@pytest.mark.parametrize("degrees", [(2, 1), (1, 2)], ids=str)
def test_what_inductor_makes_of_blocks_is_exact(groups: Groups, kind: str, degrees: tuple[int, ...]) -> None:
    call = {"kind": kind, "degrees": degrees, "backend": "inductor"}
    assert max(max(errors) for errors in groups(2).run(f"{CASES}:compiled_error", **call)) <= 1e-5
