"""Which kernel attends follows from the GPUs and the packages, not from a clock, and is the same on all ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_runtime.accelerators import FALLBACK, KERNELS, AttentionKernel
from parallel_runtime.engine.attention.dispatch import AttentionKind, attend_block, choose_kernel
from parallel_runtime.engine.attention.registry import FUNCTIONS, KernelFunction
from parallel_runtime.engine.comm.mesh import GroupState, MeshDim

from .conftest import Groups

CASES = "tests.engine.kernel_choice_cases"
CUDNN = "_native_cudnn"
ALL = {CUDNN: ["yes", "yes"], "_native_flash": ["yes", "yes"], "flash": ["yes", "yes"]}
RING, ULYSSES = [2, 1], [1, 2]


def test_where_auto_takes_no_kernel_of_the_table_the_ranks_ask_nothing() -> None:
    world = GroupState()
    query = torch.empty(1, 7, 2, 64, dtype=torch.bfloat16)
    for blocks, kernel in ((True, "native"), (False, FALLBACK)):
        kind = AttentionKind(64, torch.bfloat16, blocks)
        assert choose_kernel("auto", query, kind, MeshDim(size=2, group_state=world)) == kernel
    assert not world.working_kernels


@pytest.mark.parametrize(
    ("degrees", "masked", "works", "capabilities", "kernel"),
    [
        (ULYSSES, False, ALL, [9, 9], CUDNN),
        (ULYSSES, True, ALL, [9, 9], CUDNN),  # which takes masks
        (RING, False, ALL, [10, 9], CUDNN),
        (ULYSSES, False, ALL, [8, 8], FALLBACK),
        (ULYSSES, True, ALL, [9, 8], FALLBACK),
        (RING, False, ALL, [9, 8], None),
        (RING, False, ALL | {CUDNN: ["yes", "no"]}, [9, 9], None),
        (ULYSSES, True, ALL | {CUDNN: ["no", "no"]}, [9, 9], FALLBACK),
        (ULYSSES, False, ALL | {CUDNN: ["wrong", "yes"]}, [9, 9], FALLBACK),
        (RING, False, ALL | {CUDNN: ["wrong", "yes"]}, [9, 9], None),
    ],
)  # fmt: skip
def test_auto_takes_the_first_row_that_all_ranks_have_and_that_computes_correctly_on_each(
    groups: Groups,
    degrees: list[int],
    masked: bool,
    works: dict[str, list[str]],
    capabilities: list[int],
    kernel: str | None,
) -> None:
    given = {"degrees": degrees, "options": {}, "masked": masked, "works": works, "capabilities": capabilities}
    for answer in groups(2).run(f"{CASES}:kernels_taken", **given):
        assert answer["error"] <= 1e-5
        assert set(answer["taken"]) == ({kernel} if kernel else set())
        assert answer["asked"] == [CUDNN], "auto asks about rows that it takes on some GPU, and about no others"


@pytest.mark.parametrize("degrees", [[1, 2, 2], [2, 1, 2]], ids=str)
def test_each_batch_group_takes_what_all_of_its_own_ranks_have(groups: Groups, degrees: list[int]) -> None:
    given = {"degrees": degrees, "options": {}, "masked": False, "works": {CUDNN: ["yes"] * 4}}
    for answer in groups(4).run(f"{CASES}:kernels_taken", **given):
        assert set(answer["taken"]) == {CUDNN}
    for answer in groups(4).run(f"{CASES}:kernels_taken", **given, capabilities=[9, 8, 9, 8]):
        assert answer["error"] <= 1e-5
        assert CUDNN not in answer["taken"]


@pytest.mark.parametrize("degrees", [ULYSSES, RING], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_a_backend_that_one_rank_does_not_have_is_none_for_all(
    groups: Groups, degrees: list[int], masked: bool
) -> None:
    options, works = {"attention_backend": "_native_flash"}, {"_native_flash": ["yes", "no"]}
    answers = groups(2).run(f"{CASES}:kernels_taken", degrees=degrees, options=options, masked=masked, works=works)
    for answer in answers:
        assert answer["error"] <= 1e-5
        assert "_native_flash" not in answer["taken"]
    assert ([set(answer["taken"]) for answer in answers] == [{FALLBACK}] * 2) == (degrees == ULYSSES)


@pytest.mark.parametrize("backend", list(KERNELS))
@pytest.mark.parametrize(("world", "degrees"), [(2, [2, 1]), (2, [1, 2]), (4, [2, 2])], ids=str)
def test_a_backend_that_nobody_has_leaves_the_result_as_it_is(
    groups: Groups, world: int, degrees: list[int], backend: str
) -> None:
    options = {"attention_backend": backend}
    for errors in groups(world).run(
        "tests.engine.cases:random_errors", degrees=degrees, seeds=[1, 2, 3], options=options
    ):
        assert max(errors) <= 1e-5


@pytest.mark.parametrize(("base", "chosen"), [(math.e, CUDNN), (2.0, "native")])
@pytest.mark.parametrize("backend", ["auto", CUDNN])
def test_a_ring_takes_no_kernel_whose_log_sum_exp_it_cannot_merge(
    monkeypatch: pytest.MonkeyPatch, base: float, chosen: str, backend: str
) -> None:
    def attend(*given: Any) -> tuple[Tensor, Tensor]:
        out, lse = attend_block(*given[:3], None, None, "native")
        return out, lse.squeeze(-1).transpose(1, 2) / math.log(base)

    spec = AttentionKernel(name=CUDNN, devices=("cpu",), auto_on=(9,))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(KernelFunction, "unusable_reason", lambda *_: "")
    monkeypatch.setitem(KERNELS, CUDNN, spec)
    monkeypatch.setitem(FUNCTIONS, CUDNN, KernelFunction(spec=spec, function=attend))
    kind = AttentionKind(64, torch.float32, blocks=True)
    assert choose_kernel(backend, torch.empty(2, 40, 4, 64), kind, MeshDim()) == chosen
