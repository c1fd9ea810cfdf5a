"""UNets whose rows are divided over ranks compute what they do on one: no further from a float64 run than twice what
the undivided float32 run is."""

from __future__ import annotations

import pytest

from ..engine.conftest import Groups
from .conftest import UNET_CASES as CASES

BAR = 2.0
DIVISIONS = {"ring 2": (2, 1), "ring 3": (3, 1), "Ulysses 2": (1, 2), "2 x 2": (2, 2)}
ODD = [(13, 21, 2), (33, 20, 1), (40, 9, 1)]
EVEN = [(40, 64, 1)]
SIZES = {"SDXL": ODD, "SD1.5": ODD, "resblock_updown": EVEN, "pooled": EVEN}
NAMES = ("SD1.5", "SD1.5 inpaint", "SD2, 3 heads", "SD2 unclip", "SDXL", "SDXL refiner", "SVD", *list(SIZES)[2:])


def check(unets: Groups, name: str, division: str, sizes: list[tuple[int, ...]], **more: object) -> None:
    ring, ulysses = DIVISIONS[division]
    given = {"name": name, "ring": ring, "ulysses": ulysses, "sizes": sizes, **more}
    for of_rank in unets(ring * ulysses).run(f"{CASES}:apart", **given):
        for size, error in zip(sizes, of_rank, strict=True):
            assert error["error"] <= BAR * error["floor"], (size, error)
            assert not error["left"], "undivide leaves something behind"


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("name", ["SDXL", "SVD"])
@pytest.mark.sweep(one_in=4)
def test_it_is_the_same_by_rows_and_columns_at_odd_sizes(unets: Groups, name: str, division: str) -> None:
    check(unets, name, division, SIZES.get(name, ODD[1:2]))


@pytest.mark.sweep(one_in=12)
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("name", NAMES)
def test_all_of_them_are(unets: Groups, name: str, division: str) -> None:
    check(unets, name, division, SIZES.get(name, ODD[1:2]))


@pytest.mark.parametrize("shares", [(3, 1), (2, 5, 3), (1, 6, 0)], ids=str)
def test_shares_need_not_be_equal(unets: Groups, shares: tuple[int, ...]) -> None:
    check(unets, "SDXL", f"ring {len(shares)}", [(33, 20, 1)], shares=shares)


def test_keys_may_be_collected_at_once(unets: Groups) -> None:
    check(unets, "SDXL", "ring 3", [(33, 20, 1)], rotate_method="allgather")


@pytest.mark.parametrize("name", ["SDXL", "SVD"])
def test_tokens_may_be_collected_before_keys_are_made_of_them(unets: Groups, name: str) -> None:
    check(unets, name, "ring 3", [(33, 20, 1), (20, 33, 1)], rotate_method="tokens")


@pytest.mark.parametrize("size", [(8, 8, 1), (4, 3, 1), (16, 2, 1)], ids=str)
def test_a_latent_of_too_few_rows_is_computed_whole_on_every_rank(unets: Groups, size: tuple[int, ...]) -> None:
    """SD1.5 halves it three times: 8 rows make one, and columns of 2, 1 and 1 cannot be told apart."""
    for (error,) in unets(2).run(f"{CASES}:apart", name="SD1.5", ring=2, ulysses=1, sizes=[size]):
        assert error["from plain"] == 0.0


def test_a_norm_and_the_next_convolution_share_one_message(unets: Groups) -> None:
    (of_rank, *_) = unets(2).run(f"{CASES}:messages", name="SDXL", ring=2, ulysses=1, size=(64, 64, 1))
    assert of_rank["messages"] == of_rank["norms"] + of_rank["samplings"] + of_rank["attentions"] + 1  # the output


def test_sdxl_sends_120_messages_and_its_output(unets: Groups) -> None:
    """As deep as the published network: 46 norms, 4 convolutions between levels, 70 attentions."""
    sent = {}
    for method in ("alltoall", "tokens"):
        given = {"name": "SDXL, full depth", "ring": 2, "ulysses": 1, "size": (32, 32, 1), "rotate_method": method}
        (of_rank, *_) = unets(2).run(f"{CASES}:messages", **given)
        assert of_rank["messages"] == 46 + 4 + 70 + 1
        sent[method] = of_rank["bytes"]
    assert sent["tokens"] < 0.7 * sent["alltoall"], "tokens are half of the keys and values that are made of them"


PATCHES = (
    "FreeU", "FreeU_V2", "ToMe", "HyperTile", "Deep Shrink", "PAG", "attention by regions", "attn2_patch",
    "Hypernetwork", "GLIGEN", "emb_patch", "middle_block_after_patch", "forward_timestep_embed_patch", "each token",
    "control",
)  # fmt: skip


@pytest.mark.parametrize("name", PATCHES)
@pytest.mark.sweep(one_in=2)
def test_a_patch_sees_all_rows_and_does_what_it_does_undivided(unets: Groups, name: str) -> None:
    for (ring, ulysses), size in (((2, 1), (33, 40, 1)), ((1, 2), (64, 48, 1))):
        given = {"name": name, "ring": ring, "ulysses": ulysses, "size": size}
        for error in unets(2).run(f"{CASES}:patched", **given):
            assert error["does"] > 1e-3
            assert error["error"] <= 2e-5


def test_a_patch_that_says_that_it_computes_each_token_by_itself_gets_a_ranks_rows(unets: Groups) -> None:
    for undivided, divided in unets(2).run(f"{CASES}:seen_by_each_token", ring=2, ulysses=1, size=(64, 48, 1)):
        assert divided == undivided / 2


@pytest.mark.parametrize("name", ["PAG", "SAG"])
def test_a_patch_may_replace_attention_along_time(unets: Groups, name: str) -> None:
    """Which is in the same blocks of Stable Video Diffusion, and has no rows: each rank computes that in full."""
    for error in unets(2).run(f"{CASES}:patched", name=name, ring=2, ulysses=1, size=(16, 24, 1), of="SVD"):
        assert error["error"] <= 2e-5


@pytest.mark.sweep(one_in=28)
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_does_so_at_odd_sizes_with_two_images(unets: Groups, name: str, division: str) -> None:
    ring, ulysses = DIVISIONS[division]
    for size in ((37, 24, 2), (24, 41, 2)):
        for error in unets(ring * ulysses).run(f"{CASES}:patched", name=name, ring=ring, ulysses=ulysses, size=size):
            assert error["does"] > 1e-3
            assert error["error"] <= 2e-5


@pytest.mark.parametrize("division", ["ring 2", "Ulysses 2"])
def test_a_recorded_forward_replays_what_it_computes_eagerly(unets: Groups, division: str) -> None:
    ring, ulysses = DIVISIONS[division]
    given = {"name": "SDXL", "ring": ring, "ulysses": ulysses, "size": (33, 20, 2)}
    for error in unets(2).run(f"{CASES}:replayed", **given):
        assert error == {"same": [True, True], "replays": 2, "reasons": []}
