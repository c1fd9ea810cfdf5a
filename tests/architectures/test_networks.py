"""ComfyUI's networks compute the same on several ranks as on one: odd sizes, batches, references, masks, residuals."""

from __future__ import annotations

import pytest

from ..engine.conftest import Groups
from ..zoo.calls import CASES

EXACT = 1e-5


def check(networks: Groups, case: str, ring: int, ulysses: int) -> None:
    answers = networks(ring * ulysses).run("tests.architectures.cases:parity", name=case, ring=ring, ulysses=ulysses)
    assert max(answer["error"] for answer in answers) <= EXACT
    assert {answer["left"] for answer in answers} == {0.0}, "undivide leaves something behind"
    assert len({answer["bits"] for answer in answers}) == 1, "ranks differ"


PLANNED = [
    "flux", "chroma", "wan scail", "wan s2v", "humo", "wan animate", "wandancer", "causal wan", "chroma radiance",
    "aura flow", "pixart", "hunyuan dit", "hunyuan 3d",
    "hunyuan 3d 2.1", "mage-flow references", "z-image in pixels", "ideogram 4", "pixeldit", "pid",
    "cosmos 1", "mochi", "minimax h3", "hidream o1", "stable audio", "ace-step 1.5", "minimax music",
    "triposplat",
]  # fmt: skip
TEXT = 7  # tokens in most of these


@pytest.mark.sweep(one_in=12)
@pytest.mark.parametrize("name", PLANNED)
def test_planning_knows_its_figures(networks: Groups, name: str) -> None:
    """Its tokens are those of the latent and of the text; references and the like may join them."""
    figures = networks(2).run("tests.architectures.cases:planned", name=name, text=TEXT)[0]
    assert figures["layers"] >= 1
    assert figures["head size"] in (32, 48, 64)
    main, tokens = figures["main"], figures["tokens"]
    assert figures["cut"][main] / 2 <= tokens[main] <= figures["cut"][main]
    assert tokens.keys() - {"text"} <= figures["cut"].keys()


def test_a_kernel_of_low_precision_gets_no_call_for_which_comfyui_asks_for_more(networks: Groups) -> None:
    """Wan's picture has 257 keys, and its attention is marked so; so is every attention of ACE-Step 1.5."""
    for answer in networks(2).run("tests.architectures.cases:low_precision", name="wan i2v"):
        assert all(keys and 257 not in keys for keys in answer.values()), answer
    for answer in networks(2).run("tests.architectures.cases:low_precision", name="ace-step 1.5"):
        assert answer == {"undivided": [], "ulysses": [], "ring": []}


def test_a_prompt_may_be_as_long_as_what_the_other_rank_has_of_the_image(networks: Groups) -> None:
    check(networks, "hidream o1, a later step", 2, 1)


@pytest.mark.parametrize("degrees", [(2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("case", ["flux", "wan", "mochi", "cosmos 1"])
def test_in_float8_ranks_agree_and_the_result_is_near(networks: Groups, case: str, degrees: tuple[int, int]) -> None:
    ring, ulysses = degrees
    answers = networks(ring * ulysses).run("tests.architectures.cases:in_float8", name=case, ring=ring, ulysses=ulysses)
    assert len({answer["bits"] for answer in answers}) == 1, "ranks differ"
    assert EXACT < max(answer["error"] for answer in answers) < 0.1


@pytest.mark.sweep(one_in=4)  # each network meets one of these four divisions, and with --all every one
@pytest.mark.parametrize("case", list(CASES))
def test_three_ranks_in_a_ring(networks: Groups, case: str) -> None:
    check(networks, case, 3, 1)


@pytest.mark.sweep(one_in=4)
@pytest.mark.parametrize("case", list(CASES))
def test_two_ranks_in_a_ring(networks: Groups, case: str) -> None:
    check(networks, case, 2, 1)


@pytest.mark.sweep(one_in=4)
@pytest.mark.parametrize("case", list(CASES))
def test_two_ranks_of_ulysses(networks: Groups, case: str) -> None:
    check(networks, case, 1, 2)


@pytest.mark.sweep(one_in=4)
@pytest.mark.parametrize("case", list(CASES))
def test_two_by_two_ranks(networks: Groups, case: str) -> None:
    check(networks, case, 2, 2)


@pytest.mark.sweep(one_in=40)
@pytest.mark.parametrize("case", list(CASES))
def test_more_ranks_of_ulysses_than_heads(networks: Groups, case: str) -> None:
    check(networks, case, 1, 4)
