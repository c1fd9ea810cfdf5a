"""Every class of VAE that workers may divide, against itself in one process: tiny, random weights, odd sizes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parallel_runtime.engine.comm.mesh import MeshDim
from parallel_runtime.engine.rows.functions import Share, group_norm

from .conftest import Divided
from .names import COLUMNS, KINDS, NAMES, ROWS

BAR = 1e-5
DIVISIONS = [(ROWS, 2), (COLUMNS, 3), (COLUMNS, 2), (ROWS, 3)]
BOTH = [("decode", "encode"), ("encode", "decode")]  # so that one in two is one for each class
ONCE = [(method, name, DIVISIONS[place % 4]) for place, name in enumerate(NAMES) for method in BOTH[place % 2]]
ALL = list(itertools.product((ROWS, COLUMNS), (2, 3, 4)))
NO_KERNEL = {("encode", "Cosmos 1")}  # undivided neither: PyTorch's avg_pool3d has no bfloat16 on the CPU
IN_BFLOAT16 = [case for case in itertools.product(("decode", "encode"), NAMES) if case not in NO_KERNEL]


@pytest.mark.sweep(one_in=4)
@pytest.mark.parametrize(("method", "name", "division"), ONCE, ids=[f"{method}-{name}" for method, name, _ in ONCE])
def test_divided_is_the_same(divided: Divided, method: str, name: str, division: tuple[int, int]) -> None:
    assert divided(name, method, *division)["apart"] <= BAR


@pytest.mark.sweep
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("division", ALL, ids=str)
@pytest.mark.parametrize("method", ["decode", "encode"])
def test_divided_in_any_way_is_the_same(divided: Divided, name: str, method: str, division: tuple[int, int]) -> None:
    assert divided(name, method, *division)["apart"] <= BAR


@pytest.mark.sweep(one_in=15)
@pytest.mark.parametrize(("method", "name"), IN_BFLOAT16)
def test_in_bfloat16_ranks_differ_by_rounding_only(divided: Divided, method: str, name: str) -> None:
    assert divided(name, method, ROWS, 3, dtype="bfloat16")["apart"] <= 2.5e-2


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("name", ["SD AutoencoderKL", "TAEHV of Wan 2.2"])
def test_a_row_a_rank_is_enough(divided: Divided, name: str, ranks: int) -> None:
    latent = {"SD AutoencoderKL": [1, 8, 2, ranks], "TAEHV of Wan 2.2": [1, 48, 2, 2, ranks]}[name]
    assert divided(name, "decode", COLUMNS, ranks, latent=latent)["apart"] <= BAR


def test_noise_is_that_of_one_process_and_its_generator_goes_on_from_there(divided: Divided) -> None:
    for name in ("LTX 0.9.1, noise", "LTX 0.9.5, timestep"):
        answer = divided(name, "decode", ROWS, 3)
        assert answer["apart"] <= BAR
        assert answer["noise"]


def test_chunks_of_time_that_each_rank_chose_by_its_own_bytes_would_not_meet(divided: Divided) -> None:
    with pytest.raises(AssertionError):
        divided("LTX 0.9", "decode", ROWS, 3, own_chunks=True)


@pytest.mark.parametrize("shares", [[1, 1], [3, 1], [1, 1, 1], [2, 1, 3, 1]], ids=str)
@pytest.mark.parametrize("frames", [1, 5, 23, 40])
@pytest.mark.parametrize("method", ["decode", "encode"])
def test_ranks_compute_all_tiles_of_minimax_h3_by_their_shares(
    divided: Divided, method: str, frames: int, shares: list[int]
) -> None:
    tokens = {1: 1, 5: 2, 23: 8, 40: 14}[frames]
    latent = [2, 24, tokens, 7, 3] if method == "decode" else [1, 24, frames, 5, 6]
    answer = divided("MiniMax H3", method, ROWS, len(shares), shares=shares, latent=latent)
    assert answer["apart"] == 0
    assert sum(answer["made"]) == answer["counted"] > 1
    assert answer["frames"][0] == answer["frames"][1]
    for made, share in zip(answer["made"], shares, strict=True):
        assert abs(made - answer["counted"] * share / sum(shares)) < 2


def test_the_zoo_has_every_class_that_may_be_divided(divided: Divided) -> None:
    assert {divided(name, "kind", ROWS, 1)["kind"] for name in NAMES} == KINDS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_group_norm_in_half_precision_keeps_small_differences_of_large_values(dtype: torch.dtype) -> None:
    share = Share(ranks=MeshDim(), dim=-2, units=(256,))
    for mean, deviation in ((1.0, 1.0), (4.0, 0.5), (4.0, 0.1), (30.0, 0.1), (100.0, 0.1), (2000.0, 2.0)):
        x = (mean + deviation * torch.randn(1, 32, 256, 256, generator=torch.Generator().manual_seed(3))).to(dtype)
        weight, bias = torch.ones(32, dtype=dtype), torch.zeros(32, dtype=dtype)
        exact = F.group_norm(x.double(), 4, weight.double(), bias.double(), 1e-6)

        def away(norm: Tensor, exact: Tensor = exact) -> float:
            return float((norm.double() - exact).norm() / exact.norm())

        ours, torchs = group_norm(share, F.group_norm, x, 4, weight, bias, 1e-6), F.group_norm(x, 4, weight, bias, 1e-6)
        assert away(ours) <= 1.3 * away(torchs), f"mean {mean}, deviation {deviation}"
