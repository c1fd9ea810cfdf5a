"""Pipelines in planning: what cannot be is refused in one sentence, and stages are balanced by work and by memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from parallel_runtime.architectures.network_modules import Load, share_out
from parallel_runtime.errors import Refused
from parallel_runtime.explain.plan_report import Subject
from parallel_runtime.planning.candidates import default_plan
from parallel_runtime.planning.memory_model import Capacity
from parallel_runtime.planning.network_stats import NetworkStats
from parallel_runtime.planning.request_checks import check_run_in_patches, check_stages
from parallel_runtime.planning.resolve import ranked, resolve
from parallel_runtime.planning.run_plan import DeviceProfile, PlanInputs, RunPlan
from parallel_runtime.planning.seconds import evaluation_seconds
from parallel_runtime.request import ParallelRequest
from parallel_runtime.specs import Parallelism, Placement

from ..explain.reports import report
from .memory_cases import needed, weight_bytes

GIB = 2**30
DOUBLE, SINGLE = Load(340 << 20), Load(141 << 20)
FLUX = NetworkStats(
    name="FLUX", heads=24, layers=57, width=3072, weights=12 * 10**9, item_bytes=2,
    weight_bytes=19 * (340 << 20) + 38 * (141 << 20) + GIB,
    blocks=(340 << 20,) * 19 + (141 << 20,) * 38, loads=(DOUBLE,) * 19 + (SINGLE,) * 38,
)  # fmt: skip


def planned(gpus: int = 0, guided: bool = False, undivided: str = "", **request: object) -> Parallelism:
    network = FLUX.undivided(undivided) if undivided else FLUX
    return default_plan(
        PlanInputs(request=ParallelRequest.of(request), network=network, gpus=gpus, guided=guided)
    ).degrees  # type: ignore[arg-type]


def test_stages_take_the_workers_that_they_need_and_groups_and_ulysses_the_rest() -> None:
    assert planned(pipeline_degree=2).mesh_shape == (2, 1, 1, 1, 1)
    assert planned(gpus=2, pipeline_degree=2, guided=True).mesh_shape == (2, 1, 1, 1, 1)
    assert planned(gpus=4, pipeline_degree=2, guided=True).mesh_shape == (2, 1, 2, 1, 1)
    assert planned(gpus=4, pipeline_degree=2).mesh_shape == (2, 1, 1, 1, 2)
    assert planned(gpus=8, pipeline_degree=2, data_degree=2).mesh_shape == (2, 2, 1, 1, 2)


def test_at_cfg_1_the_other_group_of_a_stage_joins_its_ulysses() -> None:
    asked = {"gpus": 4, "pipeline_degree": 2, "cfg_degree": 2, "ulysses_degree": 1}
    assert planned(**asked, guided=True).mesh_shape == (2, 1, 2, 1, 1)  # type: ignore[arg-type]
    assert planned(**asked).mesh_shape == (2, 1, 1, 1, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        ({"ring_degree": 2}, "ring_degree 2 does not go with pipeline_degree 2; set ring_degree to 1"),
        ({"weights": "shard"}, "weights shard: .*only its own blocks.*set weights to auto"),
        ({"weights": "offload"}, "weights offload: .*only its own blocks.*set weights to auto"),
        ({"step_cache": 0.1}, "step_cache 0.1: no stage.*sees all blocks.*set step_cache to 0"),
        ({"undivided": "UNetModel"}, "UNetModel cannot be split into stages, and pipeline_degree is 2; set it to 1"),
        ({"patches": 2, "pipeline_degree": 1}, "patches 2 needs a pipeline; set patches to 1, or pipeline_degree to"),
        ({"patches": 2, "pipeline_degree": 0}, "patches 2 needs a pipeline; set patches to 1, or pipeline_degree to"),
        ({"patches": 2, "step_cache": 0.1}, "step_cache 0.1: no stage.*sees all blocks.*set step_cache to 0"),
        ({"patches": 2, "gpus": 1, "devices": "cuda:0"}, "The nearest that works is ring_degree 1"),
        ({"gpus": 2, "ulysses_degree": 2}, "pipeline_degree 2 needs 4 workers.*The nearest that works is"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(request_: dict, sentence: str) -> None:
    with pytest.raises(Refused, match=sentence):
        planned(**{"pipeline_degree": 2, **request_})


@pytest.mark.parametrize("request_", [{"gpus": 3}, {"shares": ""}, {"shares": " equal "}])
def test_a_pipeline_takes_as_many_gpus_as_it_has_stages_and_any_words_for_equal_shares(request_: dict) -> None:
    assert planned(**{"pipeline_degree": 2, "gpus": 2, **request_}).world_size == 2


def test_more_stages_than_blocks_are_refused_with_their_number() -> None:
    few = replace(FLUX, loads=(DOUBLE,) * 3)
    with pytest.raises(Refused, match="FLUX has 3 blocks for stages, and pipeline_degree is 4; set it to 3"):
        check_stages(ParallelRequest(pipeline_degree=4), few)
    with pytest.raises(Refused, match=r"the blocks of FLUX pass on more than tokens.*set it to 1"):
        check_stages(ParallelRequest(pipeline_degree=2), replace(FLUX, loads=()))
    check_stages(ParallelRequest(pipeline_degree=3), few)


def test_a_network_that_has_no_patches_is_refused_by_name_and_why() -> None:
    mixing = replace(FLUX, name="Lumina 2", why_not_in_patches="its noise_refiner needs the whole sequence")
    with pytest.raises(
        Refused, match=r"Lumina 2 has no patches, as its noise_refiner needs .*patches is 4; set it to 1"
    ):
        check_stages(ParallelRequest.of({"pipeline_degree": 2, "patches": 4}), mixing)
    check_stages(ParallelRequest(pipeline_degree=2), mixing)
    check_stages(ParallelRequest.of({"pipeline_degree": 2, "patches": 4}), FLUX)


@pytest.mark.parametrize(
    ("tokens", "steps", "warmup", "sentence"),
    [
        (3, 20, 1, "patches is 4, and this latent makes 3 tokens; set patches to 3 or fewer"),
        (3, None, 1, "patches is 4, and this latent makes 3 tokens"),
        (4096, 7, 1, r"patches 4 use keys.*a run of 7 step\(s\).*take 8 steps or more, or set patches to 1"),
        (4096, 8, 8, "warmup_steps is 8 of 8 steps, which leaves none for patches 4"),
        (4, 8, 7, ""),
        (4, None, 1000, ""),
    ],
)
def test_a_run_that_is_none_for_patches_is_refused(tokens: int, steps: int | None, warmup: int, sentence: str) -> None:
    request = ParallelRequest.of({"pipeline_degree": 2, "patches": 4, "warmup_steps": warmup})
    if not sentence:
        return check_run_in_patches(request, tokens, steps)
    with pytest.raises(Refused, match=sentence):
        check_run_in_patches(request, tokens, steps)
    check_run_in_patches(ParallelRequest(), tokens, steps)


def inputs(gib: float, tokens: int = 4608, branches: int = 1, **request: object) -> PlanInputs:
    work, capacity = FLUX.work(1, tokens, prompts=branches), Capacity(device_bytes=int(gib * GIB))
    asked = ParallelRequest.of({"pipeline_degree": 2, **request})
    gpus = 2 * asked.cfg_degree or 2
    return PlanInputs(request=asked, network=FLUX, gpus=gpus, guided=branches > 1, work=work, capacity=capacity)


def chosen(gib: float, tokens: int = 4608, branches: int = 1, **request: object) -> RunPlan:
    return resolve(inputs(gib, tokens, branches, **request))


WORK = FLUX.work(1, 4608)


def test_keys_and_values_of_patches_are_counted() -> None:
    plan, exact = chosen(24, patches=4), chosen(24)
    degrees = plan.degrees
    assert degrees == exact.degrees.with_options(token_patches=4)
    kept = 2 * 4608 * 3072 * 2 * max(degrees.stages)  # of the longest stage, in bfloat16
    assert max(WORK.cached_bytes_by_rank(degrees)) == pytest.approx(kept)
    assert max(WORK.cached_bytes_by_rank(exact.degrees)) == 0
    both = FLUX.work(1, 4608, prompts=2)
    both_groups = chosen(24, branches=2, cfg_degree=2, patches=4).degrees
    assert max(both.cached_bytes_by_rank(degrees)) == pytest.approx(2 * kept), "of both prompts"
    assert max(replace(both, prompts=1).cached_bytes_by_rank(degrees)) == pytest.approx(2 * kept), "one by one too"
    assert max(both.cached_bytes_by_rank(both_groups)) == pytest.approx(kept), "each group has its own"
    heads = replace(degrees, ulysses_degree=2)
    assert max(WORK.cached_bytes_by_rank(heads)) == pytest.approx(kept / 2), "each rank has its heads"
    stages = FLUX.stages(degrees)
    fullest = max(stage.nbytes + 2 * 4608 * 3072 * 2 * stage.count for stage in stages)
    grown = max(needed(plan)) - max(needed(exact))
    assert grown == fullest - max(stage.nbytes for stage in stages) > 1.4 * GIB, "in the stage that has most"


def test_keys_and_values_that_find_no_room_are_refused_with_numbers() -> None:
    wanted = "and 7.8 GiB of keys and values for patches more on each device"
    with pytest.raises(Refused, match=f"FLUX does not fit: .*{wanted}.* With patches 1, .* it would fit"):
        chosen(12, tokens=20000, patches=4)


def test_cp_plan_says_that_patches_are_approximate_and_what_they_keep_and_gain() -> None:
    plan = chosen(24, patches=4)
    subject = Subject(model="FLUX", latent=(1, 16, 128, 128), tokens={"image": 4096, "text": 512}, work=WORK)
    shown = report(subject, plan, guided=False, automatic=False, warmup=3)
    assert (
        "a stage computes 80% of the time. Approximate, not the picture of one GPU: after 3 exact step(s) 4"
        in shown.text
    )
    assert "Of these each worker keeps 1.53 GiB." in shown.text
    assert "Exact." not in shown.text
    assert "Stages are idle" not in shown.text
    link = DeviceProfile(bytes_per_second=1e9, flops_per_second=1e14)
    exact = evaluation_seconds(WORK, plan.degrees.with_options(token_patches=1), link)
    assert evaluation_seconds(WORK, plan.degrees, link) == pytest.approx(exact * (4 + 1) / (4 * 2) / (2 / 2))


def test_the_busiest_stage_computes_least_and_of_such_ways_holds_least() -> None:
    assert share_out([Load(1)] * 7, 3) in ((2, 2, 3), (2, 3, 2), (3, 2, 2))
    assert share_out([Load(9), Load(1), Load(1), Load(1), Load(1)], 2) == (2, 3), "of 2 + 3 and 3 + 2 the lighter"
    assert share_out([Load(1, 2), Load(1), Load(1)], 2) == (1, 2), "two blocks in one unit"
    assert share_out(FLUX.loads, 2)[0] in (28, 29), "work is even, weights are not"


def test_a_stage_holds_no_more_than_there_is_room_for() -> None:
    even = FLUX.stages(Parallelism(pipeline_degree=2))
    assert even[0].nbytes > 1.8 * even[1].nbytes
    limit = int(1.2 * sum(load.nbytes for load in FLUX.loads) / 2)
    tight = Parallelism(pipeline_degree=2, stages=share_out(FLUX.loads, 2, [limit, limit]))
    assert max(stage.nbytes for stage in FLUX.stages(tight)) <= limit
    assert FLUX.stages(tight)[1].work > 0.55


def test_stages_go_by_the_room_of_each_workers_own_device() -> None:
    weights = []
    for budgets in ((14, 6), (6, 14)):
        capacity = Capacity.of_each([gib * GIB for gib in budgets])
        plan = resolve(replace(inputs(0), capacity=capacity))
        weights.append(weight_bytes(plan))
        assert all(size <= gib * GIB for size, gib in zip(needed(plan), budgets, strict=True))
    assert weights[0][0] > weights[0][1]
    assert weights[1][0] < weights[1][1]


def test_weights_that_fit_no_device_fit_the_stages_of_a_pipeline() -> None:
    roomy, tight = chosen(24), chosen(9.5)
    assert sum(roomy.degrees.stages) == sum(tight.degrees.stages) == 57
    assert tight.degrees.stages[0] < roomy.degrees.stages[0]
    for plan in (roomy, tight):
        assert plan.weights.mode == "replicate"
        most = max(stage.nbytes for stage in FLUX.stages(plan.degrees))
        assert max(weight_bytes(plan)) == FLUX.outside_bytes + most < 0.75 * FLUX.weight_bytes
    with pytest.raises(Refused, match="does not fit"):
        chosen(4)


def test_cp_plan_says_what_each_stage_computes_and_holds_and_what_travels() -> None:
    plan = chosen(24)
    subject = Subject(model="FLUX", latent=(1, 16, 128, 128), tokens={"image": 4096, "text": 512}, work=WORK)
    assert plan.placement == Placement(devices=("cuda:0", "cuda:1"))
    shown = report(subject, plan, guided=False, automatic=False)
    assert "Degrees: pipeline_degree 2 x ring_degree 1 x ulysses_degree 1" in shown.text
    assert "Stages: 1 has blocks 1 to 28 (49% of the work, " in shown.text
    assert "One evaluation goes through them: a stage computes 50% of the time. Exact." in shown.text
    assert "Traffic: A stage sends 27.00 MiB per evaluation to the next one" in shown.text
    assert "With fast links between GPUs, Ulysses and ring are faster." in shown.text
    assert [part.lane for part in shown.parts] == ["stage 1/2", "stage 2/2"]
    assert shown.parts[0].weights[1] == shown.parts[1].weights[0] > 0.6


@pytest.mark.parametrize(
    ("gib", "host_gib", "link_bytes", "stages"),
    [
        (24, 64, 1e9, 1),  # it fits
        (9.5, 64, 1e9, 1),  # main memory has it, behind a bus
        (9.5, 4, 3e11, 1),  # parts, over a fast link
        (9.5, 4, 1e8, 2),
        (4, 4, 1e8, 1),  # too little for stages too: refused, as without them
    ],
)
def test_auto_takes_stages_where_nothing_else_fits_without_fetching_over_a_slow_link(
    gib: float, host_gib: float, link_bytes: float, stages: int
) -> None:
    capacity = Capacity(device_bytes=int(gib * GIB), host_bytes=int(host_gib * GIB))
    link = DeviceProfile(bytes_per_second=link_bytes, flops_per_second=1e14, host_bytes_per_second=2e10)
    asked = replace(inputs(0), capacity=capacity, profile=link, request=ParallelRequest(pipeline_degree=0))
    assert ranked(asked)[0].degrees.pipeline_degree == stages
    assert ranked(replace(asked, request=ParallelRequest()))[0].degrees.pipeline_degree == 1


def test_cp_plan_says_why_auto_took_stages() -> None:
    subject = Subject(model="FLUX", latent=(1, 16, 128, 128), tokens={"image": 4096}, work=WORK)
    shown = report(subject, chosen(24), guided=False, automatic=True, resorted=True)
    assert "Chosen by auto: the weights fit no other way without being fetched over a slow link." in shown.text


def test_each_rank_has_the_blocks_of_its_stage() -> None:
    degrees = Parallelism(pipeline_degree=2, ulysses_degree=2, stages=(28, 29))
    assert [degrees.blocks_of(rank) for rank in range(4)] == [(1, 28), (1, 28), (29, 57), (29, 57)]
    assert Parallelism(ulysses_degree=2).blocks_of(1) is None


@pytest.mark.parametrize(("device", "by_fp8"), [(5.0, True), (2.5, False)])
def test_a_file_in_fp8_is_named_where_the_halves_of_all_blocks_would_fit(device: float, by_fp8: bool) -> None:
    """A stage has half of the blocks, 5.8 GiB, and 1 GiB beside them."""
    network = replace(FLUX, weights=6 * 10**9)
    request = ParallelRequest.of({"pipeline_degree": 2})
    capacity = Capacity(device_bytes=int(device * GIB), host_bytes=0)
    inputs = PlanInputs(
        request=request, network=network, gpus=2, guided=False, work=network.work(1, 1000), capacity=capacity
    )
    with pytest.raises(Refused, match="does not fit") as refused:
        resolve(inputs)
    assert ("fp8" in str(refused.value)) == by_fp8
