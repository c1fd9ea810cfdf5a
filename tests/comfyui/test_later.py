"""Networks and nodes of ComfyUIs after v0.33, imitated: what our nodes ask of them and say of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..engine.conftest import Group, Ranks
from .comfy import ComfyInstall

SCENES = "tests.comfyui.later_scenes"


@pytest.fixture(scope="module")
def process(comfy: ComfyInstall) -> Iterator[Group]:
    """One process of ComfyUI's python."""
    ranks = Ranks(comfy.python, [SCENES], {"COMFYUI_PATH": str(comfy.root)})
    yield Group(ranks, 1)
    ranks.close()


def test_workers_compute_the_methods_that_code_outside_of_forward_calls(process: Group) -> None:
    (asked,) = process.run(f"{SCENES}:outer_methods")
    assert [method for method, *_ in asked] == ["preprocess_prefix", "forward"]
    assert asked[0][1:] == ["text_input_ids"]


def test_an_evaluation_by_workers_is_no_part_of_recorded_allocations(process: Group) -> None:
    (seen,) = process.run(f"{SCENES}:malloc_graph")
    assert seen == ["paused", "evaluated", "recording", "evaluated"]


def test_keys_that_another_run_has_kept_are_gone_as_a_run_begins(process: Group) -> None:
    assert process.run(f"{SCENES}:kept_keys_of_another_run") == [[None, True]]


@pytest.mark.parametrize("of_blocks", [False, True], ids=["any network", "MiniMax H3's blocks"])
def test_block_sparse_attention_is_made_again_in_workers_and_leaves_the_network_divided(
    process: Group, of_blocks: bool
) -> None:
    (found,) = process.run(f"{SCENES}:sparse_options", of_blocks=of_blocks, previous="")
    assert found.pop("no ring").endswith("make_attention_override.<locals>.override")
    assert found == {"each head": True, "same": True, "sparse": True, "anew": True, "undivided": False}


def test_block_sparse_attention_over_a_foreign_one_says_nothing_of_heads(process: Group) -> None:
    (found,) = process.run(f"{SCENES}:sparse_options", of_blocks=False, previous="foreign")
    assert found == {"each head": False}
