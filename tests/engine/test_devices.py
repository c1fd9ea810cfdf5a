"""Devices of several kinds round in ways of their own, and may draw other random numbers: all ranks learn of it."""

from __future__ import annotations

import pytest

from .conftest import Groups


@pytest.mark.parametrize(
    ("kinds", "unlike"), [(["A 132", "A 132"], False), (["A 132", "A 114"], True), (["A 132", "B 132"], True)]
)
def test_every_rank_knows_that_one_is_of_another_kind(groups: Groups, kinds: list[str], unlike: bool) -> None:
    assert groups(2).run("tests.engine.device_cases:unlike_kinds", kinds=kinds) == [unlike, unlike]


@pytest.mark.parametrize("degrees", [(2, 1), (1, 3), (2, 2)], ids=str)
def test_on_unlike_devices_all_ranks_go_on_with_the_bits_of_one(groups: Groups, degrees: tuple[int, int]) -> None:
    answers = [
        groups(degrees[0] * degrees[1]).run("tests.engine.device_cases:rounded", degrees=degrees, unlike=unlike)
        for unlike in (True, False)
    ]
    assert all(bits == answers[0][0] for bits in answers[0])
    assert answers[1][0] == answers[0][0]
    assert answers[1][1] != answers[1][0], "like ones round alike, and nothing travels"


def test_what_one_rank_could_load_and_another_refused_nobody_has(groups: Groups) -> None:
    assert groups(2).run("tests.engine.device_cases:loaded_by_one") == [
        ["another worker refused", 0],
        ["no such file here", 0],
    ]


def test_degrees_that_were_tried_and_let_go_can_be_used_again(groups: Groups) -> None:
    tried = [
        {"ring_degree": 2, "ulysses_degree": 2},
        {"cfg_degree": 2, "ulysses_degree": 2},
        {"data_degree": 2, "ring_degree": 2},
        {"pipeline_degree": 2, "ulysses_degree": 2},
        {"cfg_degree": 2, "ring_degree": 2},
    ]
    for answer in groups(4).run("tests.engine.device_cases:tried_degrees", all_degrees=tried):
        assert answer == [[4.0, 2.0, 2.0, 2.0, 2.0] * 2, True]


RTX_3090, RTX_4090 = ("RTX 3090", 125_952), ("RTX 4090", 196_608)  # threads of one wave of a drawing kernel


@pytest.mark.parametrize("comfyuis", [RTX_3090, RTX_4090, ("H100", 0)], ids=lambda card: card[0])
@pytest.mark.parametrize("side", [64, 128], ids=["SDXL", "FLUX"])  # 65,536 numbers fit into one wave, 262,144 do not
def test_on_unlike_gpus_a_sampler_draws_the_noise_of_comfyuis_own(
    groups: Groups, comfyuis: tuple[str, int], side: int
) -> None:
    cards = (RTX_4090, RTX_3090)
    case, source = "tests.engine.device_cases:drawn_by_unlike_cards", max(0, [*cards, comfyuis].index(comfyuis) % 2)

    def drawn(kinds: list[str]) -> list[tuple[list[list[float]], list[bool]]]:
        threads = [card[1] for card in cards]
        return groups(2).run(case, threads=threads, kinds=kinds, comfyui=comfyuis[0], side=side)

    shared, own = drawn([card[0] for card in cards]), drawn(["one kind"] * 2)
    assert shared[0][0] == shared[1][0] == own[source][0]
    assert (own[0][0] == own[1][0]) == (side == 64), "without it the latents of FLUX would differ"
    assert all(answer[1] == [True] for answer in shared), "in the network each rank has other tokens"
