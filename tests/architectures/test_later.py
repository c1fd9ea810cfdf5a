"""Networks of later ComfyUIs, and blocks that attend by themselves, compute the same on several ranks as on one."""

from __future__ import annotations

import pytest

from ..engine.conftest import Groups

EXACT = 1e-5
CASES = "tests.architectures.later_cases"
QWEN = [
    "qwen-image 2.1",
    "qwen-image 2.1, text alone",
    "qwen-image 2.1, a long prompt",
    "qwen-image 2.1, keys kept for the first time",
]
MING = ["ming-image", "ming-image, layers", "ming-image, references"]
SENSENOVA = ["sensenova", "sensenova, a picture of 32 pixels", "sensenova, keys of the prompt"]


def check(networks: Groups, name: str, ring: int, ulysses: int) -> None:
    answers = networks(ring * ulysses).run(f"{CASES}:parity", name=name, ring=ring, ulysses=ulysses)
    assert max(answer["error"] for answer in answers) <= EXACT
    assert {answer["left"] for answer in answers} == {0.0}, "undivide leaves something behind"
    assert len({answer["bits"] for answer in answers}) == 1, "ranks differ"


@pytest.mark.parametrize("ulysses", [2, 3, 4])
@pytest.mark.parametrize("name", QWEN)
def test_a_function_that_blocks_are_given_attends_to_all_tokens_of_a_ranks_heads(
    networks: Groups, name: str, ulysses: int
) -> None:
    check(networks, name, 1, ulysses)


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (3, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("name", MING)
def test_luminas_plan_divides_latents_of_several_frames(networks: Groups, name: str, ring: int, ulysses: int) -> None:
    check(networks, name, ring, ulysses)


@pytest.mark.parametrize("frames", [1, 3])
def test_planning_counts_the_tokens_of_all_frames(networks: Groups, frames: int) -> None:
    (figures, *_) = networks(2).run(f"{CASES}:planned", frames=frames)
    assert figures["tokens"] == figures["cut"]


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (3, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("name", SENSENOVA)
def test_layers_that_are_called_by_methods_are_divided(networks: Groups, name: str, ring: int, ulysses: int) -> None:
    check(networks, name, ring, ulysses)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_keys_that_a_network_keeps_of_its_prompt_are_those_of_a_ranks_heads(networks: Groups, ranks: int) -> None:
    for errors in networks(ranks).run(f"{CASES}:kept_keys", rooms=[True, True, True]):
        assert max(errors) <= EXACT


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_attention_that_a_file_chose_attends_in_a_function_that_blocks_are_given(
    networks: Groups, ranks: int
) -> None:
    for answer in networks(ranks).run(f"{CASES}:preferred"):
        assert answer["error"] <= EXACT
        assert answer["chosen"] > 1e-4, "another attention computed"


def test_where_one_rank_has_no_memory_for_kept_keys_none_uses_them(networks: Groups) -> None:
    for errors in networks(2).run(f"{CASES}:kept_keys", rooms=[False, True, True, False, True]):
        assert max(errors) <= EXACT


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("how", ["given", "method", "torch"])
def test_a_plan_of_three_lines_divides_blocks_that_attend_by_themselves(networks: Groups, how: str, ranks: int) -> None:
    assert max(networks(ranks).run(f"{CASES}:own", how=how, tokens=13)) <= EXACT


@pytest.mark.parametrize(("how", "name"), [("given", "attn_fn"), ("method", "attend"), ("torch", "scaled_dot")])
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (2, 2)])
def test_a_ring_is_refused_where_blocks_attend_by_themselves(
    networks: Groups, how: str, name: str, ring: int, ulysses: int
) -> None:
    for text in networks(ring * ulysses).run(f"{CASES}:refusal", how=how, words=True, ring=ring, ulysses=ulysses):
        assert name in text
        assert "ring_degree is 2; set it to 1 and use ulysses_degree" in text


@pytest.mark.parametrize("how", ["method", "bare"])
def test_blocks_that_attend_by_themselves_to_a_ranks_tokens_are_refused(networks: Groups, how: str) -> None:
    for text in networks(2).run(f"{CASES}:refusal", how=how, words=False, ring=1, ulysses=2):
        assert "OwnBlock (blocks) did not run on the workers' split tokens" in text


def test_one_block_that_attends_by_itself_is_seen_beside_one_that_does_not(networks: Groups) -> None:
    for text in networks(2).run(f"{CASES}:hidden"):
        assert "OwnBlock (blocks) did not run on the workers' split tokens" in text


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("vsa", [False, True])
def test_block_sparse_blocks_of_minimax_h3_attend_to_all_tokens_of_a_ranks_heads(
    networks: Groups, vsa: bool, ranks: int
) -> None:
    given = {"vsa": vsa, "ring": 1, "ulysses": ranks, "tokens": 23, "dense_blocks": []}
    for got, *rest in networks(ranks).run(f"{CASES}:sparse_h3", **given):
        assert rest, got
        sparse, left = rest
        assert got <= EXACT
        assert left == 0, "undivide leaves something behind"
        assert sparse > 1e-2, "the attention was not sparse"


def test_a_dense_block_of_minimax_h3_beside_sparse_ones_is_divided_too(networks: Groups) -> None:
    given = {"vsa": False, "ring": 1, "ulysses": 2, "tokens": 23, "dense_blocks": [1]}
    for got, *_ in networks(2).run(f"{CASES}:sparse_h3", **given):
        assert got <= EXACT


@pytest.mark.parametrize("strips", [True, False], ids=["from 0.38 on", "before"])
@pytest.mark.parametrize(
    ("ring", "ulysses", "stages"), [(2, 1, 1), (1, 2, 1), (3, 1, 1), (1, 3, 1), (2, 2, 1), (1, 1, 2)]
)
def test_minimax_h3_with_its_fun_control_net_is_equal_to_one_rank(
    networks: Groups, ring: int, ulysses: int, stages: int, strips: bool
) -> None:
    given = {"ring": ring, "ulysses": ulysses, "stages": stages, "strips": strips, "sparse": False}
    for got, controlled in networks(ring * ulysses * stages).run(f"{CASES}:controlled_h3", **given):
        assert got <= EXACT
        assert controlled > 1e-2, "the control changes nothing"


def test_its_fun_control_net_runs_beside_block_sparse_attention(networks: Groups) -> None:
    given = {"ring": 1, "ulysses": 2, "stages": 1, "strips": True, "sparse": True}
    for got, _ in networks(2).run(f"{CASES}:controlled_h3", **given):
        assert got <= EXACT


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ["wan", "qwen image", "flux"])
def test_block_sparse_attention_chooses_blocks_of_all_tokens_for_a_ranks_heads(
    networks: Groups, name: str, ranks: int
) -> None:
    for got, sparse in networks(ranks).run(f"{CASES}:sparse_override", name=name, ring=1, ulysses=ranks):
        assert got <= EXACT
        assert sparse > 1e-3, "the attention was not sparse"


def test_a_ring_is_refused_where_attention_is_block_sparse(networks: Groups) -> None:
    given = {"vsa": False, "ring": 2, "ulysses": 1, "tokens": 23, "dense_blocks": []}
    for (text,) in networks(2).run(f"{CASES}:sparse_h3", **given):
        assert "ring_degree is 2; set it to 1 and use ulysses_degree" in text
    for (text,) in networks(2).run(f"{CASES}:sparse_override", name="wan", ring=2, ulysses=1):
        assert "make_attention_override.<locals>.override" in text


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (3, 1)])
@pytest.mark.parametrize("name", ["ltx-2", "ltx-video"])
def test_a_mask_of_pairs_of_video_tokens_is_that_of_all_tokens(
    networks: Groups, name: str, ring: int, ulysses: int
) -> None:
    for got, masked in networks(ring * ulysses).run(f"{CASES}:masked_video", name=name, ring=ring, ulysses=ulysses):
        assert got <= EXACT
        assert masked > 1e-3, "the mask changes nothing"
