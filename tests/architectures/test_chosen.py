"""The attention that a user chose for ComfyUI computes a divided network too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..comfyui.comfy import find_comfy, why_there_is_none
from ..engine.conftest import Group, Groups, Ranks

STAND_INS = Path(__file__).parents[1] / "stand_ins"
CASE = "tests.architectures.chosen_cases:chosen"
EXACT, COARSE = 1e-5, 1e-3
RING, ULYSSES = (2, 1), (1, 2)


@pytest.fixture(scope="module")
def with_packages() -> Iterator[Groups]:
    """Ranks that have packages of attention kernels."""
    comfy = find_comfy()
    if comfy is None:
        pytest.skip(why_there_is_none())
    environment = {"COMFYUI_PATH": str(comfy.root), "PYTHONPATH": str(STAND_INS)}
    ranks = Ranks(comfy.python, ["tests.architectures.chosen_cases"], environment)
    yield lambda world: Group(ranks, world)
    ranks.close()


@pytest.mark.parametrize(
    ("function", "degrees"),
    [
        ("attention_sage", RING),
        ("attention_sage", ULYSSES),
        ("attention_sage", (2, 2)),
        ("attention_flash", RING),
        ("attention_flash", ULYSSES),
    ],
)
@pytest.mark.parametrize("name", ["flux", "wan i2v"])
def test_a_kernel_that_comfyuis_flag_names_computes_a_ring_and_each_ranks_heads(
    with_packages: Groups, name: str, function: str, degrees: tuple[int, int]
) -> None:
    ring, ulysses = degrees
    for answer in with_packages(ring * ulysses).run(CASE, name=name, function=function, ring=ring, ulysses=ulysses):
        assert answer["error"] <= EXACT
        assert answer["of pytorch's"] >= COARSE, "another kernel computed"


@pytest.mark.parametrize("name", ["flux", "qwen image mask"])
@pytest.mark.parametrize("function", ["attention_split", "attention_sub_quad"])
def test_a_function_without_a_log_sum_exp_computes_each_ranks_heads(
    with_packages: Groups, name: str, function: str
) -> None:
    for answer in with_packages(2).run(CASE, name=name, function=function, ring=1, ulysses=2):
        assert answer["error"] <= EXACT


@pytest.mark.parametrize("degrees", [RING, ULYSSES])
def test_where_the_chosen_kernel_takes_no_mask_masked_calls_go_where_comfyui_sends_them(
    with_packages: Groups, degrees: tuple[int, int]
) -> None:
    ring, ulysses = degrees
    given = {"name": "qwen image mask", "function": "attention_sage", "ring": ring, "ulysses": ulysses}
    for answer in with_packages(2).run(CASE, **given):
        assert answer["error"] <= EXACT
