"""Which kernel a ring takes is measured once, and is the same on all ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from parallel_runtime.accelerators import FALLBACK, KERNELS, AttentionKernel
from parallel_runtime.engine.comm.mesh import ContextMesh, GroupState, MeshDim
from parallel_runtime.engine.kernels import autotune
from parallel_runtime.engine.kernels.dispatch import attend_block, attend_native
from parallel_runtime.engine.kernels.registry import FUNCTIONS, KernelFunction, sdpa
from parallel_runtime.jobs import DemoJob
from parallel_runtime.request import EngineOptions
from parallel_runtime.specs import ModelSpec, Parallelism, WeightPlacement
from parallel_runtime.wire.messages import Run
from parallel_runtime.worker.kernel_advice import BenchmarkMode, kernel_advice
from parallel_runtime.worker.models import Model, Models

from ..groups import flux_job
from .conftest import Groups

CASES = "tests.engine.kernel_choice_cases"
SPEC = ModelSpec(loader="tests", files=(), weight_dtype="float32")


def test_the_kernel_whose_slowest_rank_is_fastest_wins_on_every_rank(groups: Groups) -> None:
    times = {"slow here and there": [4e-6, 5e-6], "even": [3e-6, 3e-6], "fast on one rank only": [1e-6, 9e-6]}
    for answer in groups(2).run(f"{CASES}:winners", times=times):
        assert answer["won"] == ["even", "even"]
        assert answer["timed"] == list(times)  # once
        assert answer["results"] == [
            ["7 queries x 9 keys, 2 heads of 64, bfloat16", ["even", *list(times)[::2]], [3.0, 5.0, 9.0]]
        ]


@pytest.mark.parametrize("heterogeneous", [False, True])
def test_one_kernel_alone_is_not_benchmarked(heterogeneous: bool) -> None:
    world = GroupState(heterogeneous=heterogeneous)
    sizes = autotune.AttentionSizes(batch=1, queries=7, keys=9, heads=2, head_dim=64, dtype=torch.bfloat16)
    query = torch.empty(1, 7, 2, 64, dtype=torch.bfloat16)
    assert autotune.choose_kernel("auto", query, sizes, MeshDim(size=2, group_state=world), attend_native) == "native"
    assert not world.kernel_seconds


@pytest.mark.parametrize(
    ("times", "won"),
    [
        ({"own": [2.0, 2.0], "fast": [1.0, math.nan]}, ""),
        ({"own": [2.0, 2.0], "fast": [0.0, 1.0]}, ""),
        ({"own": [2.0, 2.0], "fast": [-1.0, -1.0]}, ""),
        ({"own": [2.0, 2.0], "fast": [1.0, math.inf], "other": [1.5, 1.5]}, "other"),
    ],
)
def test_where_a_rank_measured_nothing_sensible_nothing_is_believed(
    groups: Groups, times: dict[str, list[float]], won: str
) -> None:
    for answer in groups(2).run(f"{CASES}:winners", times=times):
        assert answer["won"] == [won, won]
        assert answer["timed"] == list(times), "once: nobody measures anew in every forward"
        assert bool(answer["results"]) == bool(won)


def test_where_a_rank_could_measure_nothing_the_next_run_measures_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    timed: list[str] = []
    times = {"own": 2.0, "fast": math.nan, "other": math.inf}

    def seconds(name: str) -> float:
        timed.append(name)
        return times[name]

    def won(queries: int, world: GroupState) -> str:
        sizes = autotune.AttentionSizes(batch=1, queries=queries, keys=9, heads=2, head_dim=64, dtype=torch.bfloat16)
        dim = MeshDim(group_state=world)
        slowest = autotune.slowest_rank_seconds(list(times), sizes, dim, seconds, torch.device("cpu"))
        return min(slowest, key=slowest.__getitem__, default="own")

    models = Models(torch.device("cpu"), {DemoJob: lambda *_: Model(SPEC, torch.nn.Identity())})
    run = Run(1, SPEC, Parallelism(), WeightPlacement())
    assert [won(7, models.group_state) for _ in range(2)] == ["own", "own"]
    times["fast"] = 1.0
    assert [won(5, models.group_state), won(7, models.group_state)] == ["fast", "own"]
    models.get(run, lambda _: None, flux_job())
    assert [won(5, models.group_state), won(7, models.group_state)] == ["fast", "fast"]
    assert timed == list(times) * 3, "what is known is not measured again"


FAST = {FALLBACK: [3.0, 3.0], "_native_cudnn": [1.0, 2.0], "_native_flash": [2.5, 2.5], "flash": [0.5, 4.0]}


@pytest.mark.parametrize(
    ("masked", "seconds", "kernel"),
    [
        (False, FAST, "_native_cudnn"),  # whose slowest rank is the fastest
        (True, FAST, "_native_cudnn"),  # the only one that takes masks
        (True, FAST | {"_native_cudnn": [-1.0, -1.0]}, FALLBACK),
        (False, FAST | {"_native_cudnn": [1.0, -1.0], "_native_flash": [4.0, 1.0]}, FALLBACK),
        (False, FAST | {"_native_cudnn": [math.nan, 1.0]}, FALLBACK),
    ],
)
def test_where_keys_are_whole_all_ranks_take_the_fastest_of_theirs_and_comfyuis_own(
    groups: Groups, masked: bool, seconds: dict[str, list[float]], kernel: str
) -> None:
    answers = groups(2).run(f"{CASES}:kernels_taken", degrees=[1, 2], options={}, masked=masked, seconds=seconds)
    for answer in answers:
        assert answer["error"] <= 1e-5
        assert set(answer["taken"]) == {kernel}


@pytest.mark.parametrize(("capability", "kernel"), [([8, 9], FALLBACK), ([9, 0], "_native_cudnn")])
def test_several_batch_groups_take_what_is_likely_and_measure_nothing(
    groups: Groups, capability: list[int], kernel: str
) -> None:
    seconds = {name: [1.0] * 4 for name in FAST} | {"flash": [0.1] * 4}
    given = {"degrees": [1, 2, 2], "options": {}, "masked": False, "seconds": seconds, "capability": capability}
    for answer in groups(4).run(f"{CASES}:kernels_taken", **given):
        assert (answer["timed"], set(answer["taken"])) == ([], {kernel})


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("world", "degrees"), [(2, [1, 2]), (4, [1, 2, 2])], ids=str)
def test_cards_of_unlike_capability_measure_together_and_take_what_all_have(
    groups: Groups, world: int, degrees: list[int], masked: bool
) -> None:
    seconds = {name: [1.0] * world for name in FAST} | {FALLBACK: [3.0] * world}
    given = {"degrees": degrees, "options": {}, "masked": masked, "seconds": seconds, "capability": [9, 0]}
    for answer in groups(world).run(f"{CASES}:kernels_taken", **given, fits=[True, False] * (world // 2)):
        assert answer["error"] <= 1e-5
        assert set(answer["taken"]) == {FALLBACK}


@pytest.mark.parametrize(("fits", "kernels"), [([True] * 4, ["_native_cudnn"]), ([True, False] * 2, [])], ids=str)
def test_rings_of_several_batch_groups_take_the_likely_fastest_kernel_that_all_their_ranks_have(
    groups: Groups, fits: list[bool], kernels: list[str]
) -> None:
    seconds = {name: [1.0] * 4 for name in FAST}
    given = {"degrees": [2, 1, 2], "options": {}, "masked": False, "seconds": seconds, "capability": [9, 0]}
    for answer in groups(4).run(f"{CASES}:kernels_taken", **given, fits=fits):
        assert answer["error"] <= 1e-5
        assert (answer["timed"], sorted(set(answer["taken"]))) == ([], kernels)


@pytest.mark.parametrize("degrees", [[1, 2], [2, 1]], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_a_backend_that_one_rank_does_not_have_is_none_for_all(
    groups: Groups, degrees: list[int], masked: bool
) -> None:
    seconds = {FALLBACK: [3.0, 3.0], "_native_cudnn": [1.0, -1.0]}
    options = {"attention_backend": "_native_cudnn"}
    answers = groups(2).run(f"{CASES}:kernels_taken", degrees=degrees, options=options, masked=masked, seconds=seconds)
    for answer in answers:
        assert answer["error"] <= 1e-5
        assert "_native_cudnn" not in answer["taken"]
    assert ([set(answer["taken"]) for answer in answers] == [{FALLBACK}] * 2) == (degrees == [1, 2])


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


def attended(tokens: int, *, masked: bool = False) -> torch.Tensor:
    query = torch.randn(1, 2, tokens, 8, generator=torch.Generator().manual_seed(tokens))
    mask = torch.ones(tokens, tokens, dtype=torch.bool) if masked else None
    return torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)


@pytest.fixture
def kernel_times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The CPU under the name of another kernel, and the times of both."""
    times = {FALLBACK: 2.0, "_native_cudnn": 1.0}
    spec = AttentionKernel(name="_native_cudnn", devices=("cpu",), max_head_dim=64, benchmark=("full",))
    monkeypatch.setattr(KernelFunction, "unusable_reason", lambda *_: "")
    monkeypatch.setitem(KERNELS, spec.name, spec)
    monkeypatch.setitem(
        FUNCTIONS, spec.name, KernelFunction(spec=spec, function=lambda *given: (sdpa(*given[:5]), None))
    )
    order = iter(list(times) * 9)
    monkeypatch.setattr(autotune, "time_runs", lambda run, _: (run(), times[next(order)])[1])
    return times


@pytest.mark.parametrize(("base", "chosen"), [(math.e, "_native_cudnn"), (2.0, "native")])
@pytest.mark.parametrize("backend", ["auto", "_native_cudnn"])
@pytest.mark.parametrize("batch_groups", [1, 2])
def test_a_ring_takes_no_kernel_whose_log_sum_exp_it_cannot_merge(
    kernel_times: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
    base: float,
    chosen: str,
    backend: str,
    batch_groups: int,
) -> None:
    spec = replace(KERNELS["_native_cudnn"], benchmark=("block",))

    def attend(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attend_block(*given[:3], None, None, "native")
        return out, lse.squeeze(-1).transpose(1, 2) / math.log(base)

    monkeypatch.setitem(KERNELS, spec.name, spec)
    monkeypatch.setitem(FUNCTIONS, spec.name, KernelFunction(spec=spec, function=attend))
    monkeypatch.setattr(autotune, "benchmark_candidates", lambda *_: ["_native_cudnn", "_native_flash"])
    monkeypatch.setattr(autotune, "time_runs", lambda run, _: (run(), 1.0)[1])
    sizes = autotune.AttentionSizes(batch=2, queries=40, keys=90, heads=4, head_dim=64, dtype=torch.float32)
    query = torch.empty(2, 40, 4, 64)
    assert autotune.choose_kernel(backend, query, sizes, MeshDim(), attend_native, batch_groups) == chosen


@pytest.mark.parametrize(("seconds", "advised"), [(1.0, True), (1.8, False)])
def test_one_worker_keeps_its_bits_and_is_told_once_of_a_kernel_that_is_clearly_faster(
    kernel_times: dict[str, float], seconds: float, advised: bool, caplog: pytest.LogCaptureFixture
) -> None:
    kernel_times["_native_cudnn"] = seconds
    expected = {tokens: attended(tokens) for tokens in (1024, 1100)}
    rank = MeshDim()
    with BenchmarkMode(rank):
        for _ in range(2):
            for tokens, alone in expected.items():
                assert torch.equal(attended(tokens), alone)
    assert [result.what for result in autotune.benchmark_results(rank.group_state)] == ["alone", "alone"], (
        "each size once"
    )
    messages = [record.getMessage() for record in caplog.records]
    benchmarks = [text for text in messages if text.startswith("[CP] kernels: ")]
    assert len(benchmarks) == 2, "the log has the times of both sizes"
    assert all("ComfyUI's own 2e+06 us, for 1" in text for text in benchmarks)
    messages = [text for text in messages if text not in benchmarks]
    assert ["set attention_backend to _native_cudnn" in text for text in messages] == [True] * advised


def test_small_and_masked_attentions_of_one_worker_are_left_alone(kernel_times: dict[str, float]) -> None:
    rank = MeshDim()
    with BenchmarkMode(rank):
        attended(1000)
        attended(1100, masked=True)
    assert autotune.benchmark_results(rank.group_state) == ()


def test_the_first_evaluation_of_each_shape_is_watched_where_comfyui_chooses() -> None:
    def watched(model: Model, rows: int) -> bool:
        return isinstance(kernel_advice(model, torch.empty(rows, 4, 8, 8, device="meta")), BenchmarkMode)

    model = Model(ModelSpec(loader="test"), torch.nn.Identity())
    model.parallelism = Parallelism()
    assert [watched(model, rows) for rows in (1, 1, 2, 1, 2)] == [True, False, True, False, False]
    model.parallelism = Parallelism(options=EngineOptions(attention_backend="native"))
    assert not watched(model, 3)
    model.parallelism, model.mesh = Parallelism(ulysses_degree=2), ContextMesh(context=MeshDim(size=2))
    assert not watched(model, 4)
    assert not isinstance(kernel_advice(model, torch.empty(1)), BenchmarkMode)
