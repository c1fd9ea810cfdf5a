"""PipeFusion computes what its definition says: with this step's keys of patches that have passed, else the last's."""

from __future__ import annotations

import pytest

from ..engine.conftest import Groups
from ..zoo.calls import CASES

SAME, EXACT = 1e-6, 1e-5  # kernels may round otherwise where there are fewer tokens; where others attend
REFUSED = {  # what keeps a network's tokens from going patch by patch
    "mask": ("qwen image mask", "mage-flow references", "lens"),
    "need the whole sequence": (
        "z-image", "z-image references", "lumina 2", "z-image in pixels", "omnigen 2", "omnigen 2 references", "boogu",
        "boogu references", "chroma radiance", "hunyuan video", "hunyuan video mask", "hunyuan video i2v",
        "hunyuan video i2v, guiding frame", "hunyuan video residuals", "hunyuan video residuals of both kinds",
        "hunyuan video 1.5", "triposplat", "triposplat with a reference", "ace-step",
    ),
    "whole sequence is needed": ("cosmos 1",),
    "more than tokens for later blocks": (
        "wan vace", "hunyuan 3d 2.1", "hunyuan dit", "hunyuan dit residuals", "pid", "hidream o1",
        "hidream o1, a later step",
    ),
    "whole frames": ("wan animate", "wan s2v", "wan s2v with motion", "humo", "wandancer",
                     "wandancer, all of the dance"),
    "is whole in every block": ("hidream i1", "mochi", "mochi, 1 text token"),
    "a sequence beside": ("ltx-2", "ltx-2, a time for each frame"),
    "several times in an evaluation": ("minimax music", "minimax music, two windows"),
}  # fmt: skip
WHY = {name: why for why, names in REFUSED.items() for name in names}
STALE = ["flux", "flux, 63 text tokens", "flux 2", "chroma", "wan", "qwen image"]  # what stale_keys.py knows
CUT = [name for name in CASES if name not in WHY]


@pytest.mark.parametrize(("name", "stages", "patches"), [("flux", 3, 4), ("wan", 2, 2)])
def test_the_bits_are_those_of_the_definition(networks: Groups, name: str, stages: int, patches: int) -> None:
    _check_stale(networks, name, stages, patches)


@pytest.mark.sweep
@pytest.mark.parametrize("name", STALE)
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("patches", [2, 4])
def test_of_any_network_too(networks: Groups, name: str, stages: int, patches: int) -> None:
    _check_stale(networks, name, stages, patches)


def _check_stale(networks: Groups, name: str, stages: int, patches: int) -> None:
    answers = networks(stages).run("tests.architectures.patch_cases:stale", name=name, stages=stages, patches=patches)
    assert [answer["error"] for answer in answers] == [[0.0] * 4] * stages
    assert all(answer["stale"][0] == 0.0 and min(answer["stale"][1:]) > 1e-4 for answer in answers)
    assert len({answer["bits"] for answer in answers}) == 1, "ranks differ"


def test_as_many_steps_are_exact_as_are_asked_for(networks: Groups) -> None:
    for answer in networks(2).run("tests.architectures.patch_cases:stale", name="wan", stages=2, patches=4, exact=3):
        assert answer["error"] == [0.0] * 4
        assert answer["stale"][:3] == [0.0] * 3
        assert answer["stale"][3] > 1e-4


@pytest.mark.sweep(one_in=4)
@pytest.mark.parametrize("name", ["flux, 63 text tokens", "wan", "flux 2", "qwen image"])
def test_with_keys_kept_as_heads_where_two_share_a_sequence(networks: Groups, name: str) -> None:
    answers = networks(4).run("tests.architectures.patch_cases:stale", name=name, stages=2, patches=3, ulysses=2)
    assert max(max(answer["error"]) for answer in answers) <= EXACT
    assert all(min(answer["stale"][1:]) > 1e-4 for answer in answers)
    assert len({answer["bits"] for answer in answers}) == 1, "ranks differ"


def test_keys_of_all_heads_are_kept_at_once(networks: Groups) -> None:
    assert max(max(answer["error"]) for answer in networks(4).run("tests.architectures.patch_cases:two_waves")) <= EXACT


def test_a_mask_of_all_pairs_is_that_of_a_patchs_queries(networks: Groups) -> None:
    given = dict(name="flux redux, hidden pairs", stages=2, patches=4)
    _check_same(networks(2).run("tests.architectures.patch_cases:same_input", **given), SAME)


@pytest.mark.sweep(one_in=12)
@pytest.mark.parametrize("name", CUT)
def test_where_nothing_is_stale_it_is_exact(networks: Groups, name: str) -> None:
    _check_same(networks(2).run("tests.architectures.patch_cases:same_input", name=name, stages=2, patches=4), SAME)


@pytest.mark.sweep(one_in=30)
@pytest.mark.parametrize("name", CUT)
def test_so_it_is_where_two_share_a_sequence(networks: Groups, name: str) -> None:
    given = dict(name=name, stages=2, patches=3, ulysses=2)
    _check_same(networks(4).run("tests.architectures.patch_cases:same_input", **given), EXACT)


def _check_same(answers: list[dict[str, float]], limit: float) -> None:
    assert max(max(answer["first"], answer["alone"], answer["in flight"]) for answer in answers) <= limit
    assert {answer["left"] for answer in answers} == {0.0}, "something is left behind"
    assert {answer["kept"] for answer in answers} == {2.0}, "two evaluations are in flight"
    assert len({answer["bits"] for answer in answers}) == 1, "ranks differ"


def test_a_prompt_that_comes_is_exact_at_first_and_one_that_goes_is_forgotten(networks: Groups) -> None:
    for answer in networks(2).run("tests.architectures.patch_cases:comes_and_goes"):
        exact = [[error <= SAME for error in step] for step in answer["errors"]]
        assert exact == [[True], [False, True], [False], [False, True], [False, False], [True]]
        assert answer["kept"] == [1.0, 2.0, 1.0, 2.0, 2.0, 1.0, 0.0], "as planning counts them"


def test_a_run_begins_with_exact_steps_by_their_noise_levels_and_with_nothing_kept_and_leaves_nothing(
    networks: Groups,
) -> None:
    for answer in networks(2).run("tests.architectures.patch_cases:a_run"):
        assert answer["exact"] == [True, True, True, True, False, False, False, *(True, True, False), True]
        assert answer["kept"] == [False, True, False] * 3


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("name", list(WHY))
def test_refused_by_name(networks: Groups, name: str) -> None:
    messages = networks(2).run("tests.architectures.patch_cases:refusal", name=name, patches=4)
    assert any(WHY[name] in words for words in messages)


def test_more_patches_than_tokens_are_refused(networks: Groups) -> None:
    messages = networks(2).run("tests.architectures.patch_cases:refusal", name="wan", patches=106)
    assert all("patches is 106" in words and "105 tokens" in words for words in messages)


@pytest.mark.parametrize("what", ["double_block", "dit"])
def test_what_sees_all_tokens_between_blocks_is_refused(networks: Groups, what: str) -> None:
    messages = networks(2).run("tests.architectures.patch_cases:refusal", name="flux", patches=2, between=what)
    assert all("patches" in words and "between blocks" in words for words in messages)
