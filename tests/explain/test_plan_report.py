"""CP Plan's words, and the rows that they are views of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from parallel_runtime.architectures.row_plan import RowLevel
from parallel_runtime.errors import say
from parallel_runtime.explain.plan_report import Report, Row, Subject
from parallel_runtime.group.history import Pace, RunSetup
from parallel_runtime.planning.network_stats import NetworkStats, Work
from parallel_runtime.planning.run_plan import DeviceProfile, Estimate, RunPlan
from parallel_runtime.request import EngineOptions, widgets
from parallel_runtime.specs import Parallelism, Placement, WeightPlacement

from .reports import report

WORK = NetworkStats(name="FLUX", heads=24, layers=57, width=3072, weights=10, weight_bytes=20, item_bytes=2).work(
    1, 4608
)


FETCHED = Estimate(
    weight_bytes_by_rank=(10, 10),
    activation_bytes_by_rank=(0, 0),
    buffer_bytes_by_rank=(0, 0),
    fetched_bytes=15,
    batch_seconds=2.0,
    exposed_seconds=0.5,
)


def words(
    *,
    guided: bool = False,
    batch_coupled: bool = False,
    weights: WeightPlacement | None = None,
    entries_per_call: int = 0,
    work: Work = WORK,
    **degrees: Any,
) -> str:
    return report_of(work, divided(degrees), guided, batch_coupled, weights, entries_per_call)


def report_of(
    work: Work,
    asked: Parallelism,
    guided: bool = False,
    batch_coupled: bool = False,
    weights: WeightPlacement | None = None,
    entries_per_call: int = 0,
) -> str:
    tokens = {"image": 4096, "text": 512}
    subject = Subject(model="FLUX", latent=(1, 16, 128, 128), tokens=tokens, work=work, batch_coupled=batch_coupled)
    devices = tuple(f"cuda:{number}" for number in range(asked.world_size))
    plan = RunPlan(degrees=asked, placement=Placement(devices=devices), entries_per_call=entries_per_call)
    if weights is not None:
        plan = replace(plan, weights=weights, estimate=FETCHED)
    return report(subject, plan, guided=guided, automatic=False).text


def divided(values: dict[str, Any]) -> Parallelism:
    """Degrees, and widgets of the engine's options."""
    options = {row.name: row.field for row in widgets() if row.of_engine}
    degrees = {name: value for name, value in values.items() if name not in options}
    set_options = {options[name]: value for name, value in values.items() if name in options}
    return Parallelism(**degrees, options=EngineOptions(**set_options))


def test_a_network_that_no_plan_cuts_has_a_report_once_the_workers_have_measured_their_link() -> None:
    work = replace(WORK.network, heads=1, layers=0, width=0).undivided("UNetModel").work(1, 0, prompts=2)
    subject = Subject(model="SDXL", latent=(1, 4, 64, 64), tokens={}, work=work)
    division = RunPlan(degrees=Parallelism(cfg_degree=2), placement=Placement(devices=("cuda:0", "cuda:1")))
    link = DeviceProfile(bytes_per_second=1e10, flops_per_second=1e14)
    text = report(subject, division, guided=True, automatic=True, profile=link).text
    assert "Speed" not in text
    assert "cfg_degree 2" in text


def test_cfg_degree_2_is_advised_where_it_would_gain_and_only_there() -> None:
    advice, sharded = "cfg_degree 2 needs less traffic", WeightPlacement(mode="shard")
    assert advice in words(ulysses_degree=2, guided=True)
    assert advice not in words(ulysses_degree=2, guided=False)
    assert advice not in words(ulysses_degree=2, guided=True, batch_coupled=True)
    assert advice not in words(ulysses_degree=2, guided=True, weights=sharded), "each half would have its own weights"
    assert "each keeps a part of the weights" in words(ulysses_degree=2, guided=True, weights=sharded)
    fetched = WeightPlacement(mode="offload")
    assert advice not in words(ulysses_degree=2, guided=True, weights=fetched), "auto may have had reasons"


@pytest.mark.parametrize(
    ("prompts", "entries_per_call", "says"), [(1, 0, "one prompt"), (2, 0, "2 prompts at once"), (2, 1, "one prompt")]
)
def test_the_seconds_of_an_evaluation_are_of_the_prompts_in_it(prompts: int, entries_per_call: int, says: str) -> None:
    figures = replace(WORK.network, blocks=(5,) * 4)
    weights = WeightPlacement(mode="shard", resident_blocks=1)
    text = words(
        ulysses_degree=2,
        guided=True,
        weights=weights,
        entries_per_call=entries_per_call,
        work=figures.work(1, 4608, prompts=prompts),
    )
    assert f"2.00 s for {says}, 0.50 s of them waiting" in text


@pytest.mark.parametrize(
    ("devices", "promised"), [(("cuda:0", "cuda:1"), True), (("cuda:0", "cuda:0"), False), (("cpu", "cpu"), False)]
)
def test_no_speed_is_promised_where_workers_share_a_device(devices: tuple[str, ...], promised: bool) -> None:
    subject = Subject(model="FLUX", latent=(1, 16, 128, 128), tokens={"image": 4096, "text": 512}, work=WORK)
    division = RunPlan(degrees=Parallelism(ulysses_degree=2), placement=Placement(devices=devices))
    link = DeviceProfile(bytes_per_second=3e11, flops_per_second=1.4e14)
    text = report(subject, division, guided=False, automatic=False, profile=link).text
    assert ("times as fast as on one worker" in text) == promised


def test_unequal_shares_are_told_in_percent_and_one_without_work_is_advised_against() -> None:
    text = words(ulysses_degree=2, shares=(3, 2))
    assert "Shares: cuda:0 60 %, cuda:1 40 %" in text
    assert "gets no work" not in text
    assert "Shares:" not in words(ulysses_degree=2, shares=(3, 3))
    assert "cuda:1 gets no work and only waits for the others: leave it out" in words(ulysses_degree=2, shares=(5, 0))


def test_memory_is_that_of_the_worker_with_the_most_tokens() -> None:
    def gib(**degrees: Any) -> float:
        return float(words(**degrees).split("Memory: about ")[1].split(" GiB")[0])

    assert gib(ulysses_degree=2, shares=(3, 1)) == pytest.approx(1.5 * gib(ulysses_degree=2), abs=0.02)


def test_a_step_cache_is_said_to_be_approximate() -> None:
    assert "Approximate, not the picture of one GPU: step_cache 0.06" in words(ulysses_degree=2, step_cache=0.06)
    assert "Approximate" not in words(ulysses_degree=2)


def test_what_float8_gains_on_the_wire_and_what_it_costs_is_said() -> None:
    float8 = words(ulysses_degree=2, comm_dtype="float8_e4m3fn")
    assert "Approximate, not the picture of one GPU: queries, keys and values travel as float8_e4m3fn" in float8
    assert "which is 51% of the bytes. On the demo's model the result differed by 1.4%" in float8
    assert "sends 27.00 MiB" in words(ulysses_degree=2)
    assert "sends 13.71 MiB" in float8
    assert "comm_dtype float8_e4m3fn changes nothing here" in words(comm_dtype="float8_e4m3fn")


def test_how_a_ring_moves_keys_is_told() -> None:
    assert "The ring passes keys and values between 2 workers while they compute (rotate_method alltoall)." in words(
        ring_degree=2
    )
    collected = words(ring_degree=2, rotate_method="allgather")
    assert "of all 2 workers before they compute (rotate_method allgather)." in collected


def test_the_traffic_of_a_unet_goes_by_its_levels_and_is_half_where_tokens_are_collected() -> None:
    level = RowLevel(weights=1, attentions=1, width=64, messages=1)
    network = replace(WORK.network, layers=2, row_levels=(level, level))  # of 0.5 and 0.125 MiB
    work = replace(network.work(1, 4096), row_ranks=2)
    assert "sends 0.31 MiB in each of 2 layers, 0.6 MiB per evaluation" in words(work=work, ring_degree=2)
    collected = replace(divided({"ring_degree": 2}), options=EngineOptions(rotate_method="tokens"))
    text = report_of(work, collected)
    assert "sends 0.16 MiB in each of 2 layers" in text
    assert "collects the tokens of all 2 workers" in text
    assert "none inside the model" in words(work=work, ring_degree=3), "each computes all of it"


def test_what_sees_all_prompts_at_once_is_told() -> None:
    assert "so all workers share the tokens of both" in words(ulysses_degree=2, guided=True, batch_coupled=True)
    assert "data_degree 2 gains nothing" in words(data_degree=2, guided=True, batch_coupled=True)


def test_a_plan_for_one_gpu_says_where_comfyui_hides_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def notes(*devices: str) -> list[str]:
        subject = Subject(model="FLUX", latent=(1, 16, 128, 128), tokens={"image": 4096}, work=WORK)
        division = RunPlan(degrees=Parallelism(ulysses_degree=len(devices)), placement=Placement(devices=devices))
        text = report(subject, division, guided=False, automatic=True).text
        return [line for line in text.splitlines() if "--cuda-device all" in line]

    monkeypatch.setattr("sys.argv", ["main.py"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (line,) = notes("cuda:0")
    assert line.startswith("Note: CUDA_VISIBLE_DEVICES is 0, which hides the other GPUs: start ComfyUI without it")
    assert notes("cpu") == notes("cuda:0", "cuda:1") == []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert notes("cuda:0") == []


@pytest.mark.parametrize(
    ("placement", "untried"),
    [
        (Placement(devices=("cuda:0", "cuda:1")), "Several GPUs at once"),
        (Placement(devices=("cuda:0",), nnodes=2, rdzv_endpoint="10.0.0.1:29500"), "Several machines with GPUs"),
        (Placement(devices=("xpu:0",)), "Devices of the kind xpu"),
        (Placement(devices=("cuda:0", "cuda:0")), ""),
        (Placement(devices=("cuda:0",)), ""),
        (Placement(devices=("cpu", "cpu")), ""),
    ],
)
def test_what_nobody_has_run_on_hardware_is_said(placement: Placement, untried: str) -> None:
    subject = Subject(model="FLUX", latent=(1, 16, 128, 128), tokens={"image": 4096}, work=WORK)
    division = RunPlan(degrees=Parallelism(ring_degree=placement.world_size), placement=placement)
    text = report(subject, division, guided=False, automatic=False).text
    notes = [line.partition(" have not been tried on hardware yet")[0] for line in text.splitlines() if "tried" in line]
    assert notes == ([f"Note: {untried}"] if untried else [])


@pytest.mark.parametrize(
    ("degrees", "recorded", "compiled", "says"),
    [
        (
            {},
            True,
            False,
            "CUDA graphs if Python cannot keep the GPU busy; they take about 0.53 GiB",
        ),
        (
            {"cuda_graphs": "on"},
            True,
            False,
            "CUDA graphs, which take about 0.53 GiB. With compile on",
        ),
        ({}, True, True, "Together with compile on that is the fastest"),
        ({"cuda_graphs": "off"}, True, False, "kernel by kernel"),
        ({}, False, False, "kernel by kernel"),
    ],
)
def test_how_evaluations_are_launched_is_told_of_gpus(degrees: dict, recorded: bool, compiled: bool, says: str) -> None:
    work = replace(WORK, recorded=recorded)
    subject = Subject(model="FLUX", latent=(1, 16, 128, 128), tokens={"image": 4608}, work=work, compiled=compiled)

    def launch(device: str) -> list[str]:
        division = RunPlan(degrees=divided(degrees), placement=Placement(devices=(device,)))
        text = report(subject, division, guided=False, automatic=False).text
        return [line for line in text.splitlines() if line.startswith("Launch: ")]

    assert launch("cpu") == []
    (line,) = launch("cuda:0")
    assert says in line


def test_text_and_table_say_the_same_whatever_stands_in_the_words() -> None:
    rows = (
        Row("", "The CP Parallel Config cannot work: Note: no such device.", "trouble"),
        Row("", "With the degrees on auto:"),
        Row("Model", "flux (a: b.safetensors), 2 layers.", "model"),
        Row("Speed", "fast: very,\nand so on."),
        Row("Note", "uneven: slow.", "note"),
    )
    report = Report(rows=rows)
    assert report.text == (
        "The CP Parallel Config cannot work: Note: no such device.\nWith the degrees on auto:\n"
        "flux (a: b.safetensors), 2 layers.\nSpeed: fast: very,\nand so on.\nNote: uneven: slow."
    )
    assert report.table == {
        "troubles": [["The CP Parallel Config cannot work: Note: no such device."]],
        "rows": [
            ("", ["With the degrees on auto:"]),
            ("Model", ["flux (a: b.safetensors), 2 layers."]),
            ("Speed", ["fast: very,\nand so on."]),
        ],
        "notes": [["uneven: slow."]],
    }


def test_a_refusal_comes_first_and_a_reason_for_whole_weights_last() -> None:
    trouble = Row("", "There is too little memory: 20 GiB.", "trouble")
    subject = Subject(model="FLUX", latent=(1, 16, 128, 128), tokens={}, work=WORK)
    estimate = Estimate(weight_bytes_by_rank=(1,), activation_bytes_by_rank=(1,), buffer_bytes_by_rank=(0,))
    one = RunPlan(degrees=Parallelism(), placement=Placement(devices=("cpu",)), estimate=estimate)
    shown = report(subject, one, guided=False, automatic=True, troubles=[trouble], weights="shard", decode="0 s.")
    assert [row.title for row in shown.rows] == [
        "", "Model", "Tokens", "Workers", "Degrees", "Memory", "Weights", "Traffic", "Decode", "Note",
    ]  # fmt: skip
    assert shown.text.startswith("There is too little memory: 20 GiB.\nFLUX\nTokens: not split")
    assert "Decode: 0 s.\nNote: " in shown.text
    assert "shard" in shown.rows[-1].text
    assert shown.parts == (), "no picture of what will not run"


def test_what_is_said_is_data_for_other_languages() -> None:
    subject = Subject(model="FLUX", latent=(1, 16, 128, 128), tokens={"image": 4096}, work=WORK)
    two = RunPlan(degrees=Parallelism(ulysses_degree=24), placement=Placement(devices=("cuda:0",) * 24))
    table = report(subject, two, guided=False, automatic=False).table
    values = dict(table["rows"])
    assert values["Tokens"] == [{"code": "tokens.one", "values": {"tokens": "4096 image", "rows": 1}}]
    assert {"code": "heads.one", "values": {"workers": 24, "heads": 1}} in values["Degrees"]
    assert [note["code"] for [note] in table["notes"]] == ["note.twice"]


def test_where_control_nets_run_and_why_the_loop_stays_is_said_where_there_is_something_to_say() -> None:
    subject = Subject(model="FLUX", latent=(1, 16, 128, 128), tokens={"image": 4096}, work=WORK)
    plan = RunPlan(degrees=Parallelism(), placement=Placement(devices=("cuda:0",)))

    def lines(subject: Subject) -> list[str]:
        text = report(subject, plan, guided=False, automatic=True).text
        return [line for line in text.splitlines() if line.startswith(("ControlNets", "Loop"))]

    assert lines(subject) == []
    sentence = say("controls", count=2, size="1.50")
    assert lines(replace(subject, controls=sentence)) == [
        "ControlNets: in the workers: 2, with 1.50 GiB of weights on each of them."
    ]
    (loop,) = lines(replace(subject, loop=say("loop.comfyui", reason=say("unsendable.control.patched", what="x"))))
    assert loop.startswith("Loop: stays in ComfyUI's process, with one round trip per evaluation, because x has a")


@pytest.mark.parametrize(("rows", "bytes_per_second", "advised"), [(4, 5e9, True), (4, 0.0, False), (1, 5e9, False)])
def test_a_batch_of_whole_images_is_advised_where_the_estimate_is_faster(
    rows: int, bytes_per_second: float, advised: bool
) -> None:
    work = replace(WORK.network, weights=12_000_000_000).work(rows, 4608)
    subject = Subject(model="FLUX", latent=(rows, 16, 128, 128), tokens={"image": 4096, "text": 512}, work=work)
    devices = tuple(f"cuda:{number}" for number in range(4))
    plan = RunPlan(degrees=Parallelism(ulysses_degree=4), placement=Placement(devices=devices))
    profile = DeviceProfile(bytes_per_second=bytes_per_second, flops_per_second=5e14)
    text = report(subject, plan, guided=False, automatic=False, profile=profile).text
    assert ("Set data_degree to 4" in text) == advised
    assert ("4 at a time: about " in text) == advised
    divided_already = RunPlan(degrees=Parallelism(data_degree=4), placement=Placement(devices=devices))
    assert "at a time" not in report(subject, divided_already, guided=False, automatic=False, profile=profile).text


def test_what_was_measured_comes_first_with_its_time() -> None:
    plan = RunPlan(degrees=Parallelism(ulysses_degree=2), placement=Placement(devices=("cuda:0", "cuda:1")))
    subject = Subject(model="FLUX", latent=(1, 16, 128, 128), tokens={"image": 4096}, work=WORK)
    setup = RunSetup.of(plan.degrees, plan.placement)
    measured = Pace(setup=setup, seconds=0.5, speedup=1.8, at=1_000_000.0)
    first = report(subject, plan, guided=False, automatic=False, pace=measured).text.splitlines()[0]
    assert first.startswith("Speed: 2 GPUs: 0.50 s per step, 1.8 x one worker, measured 1970-01-1")


def test_the_text_has_what_measure_has_found_on_fewer_workers_and_the_page_has_it_as_bars() -> None:
    two = RunPlan(degrees=Parallelism(ulysses_degree=2), placement=Placement(devices=("cuda:0", "cuda:1")))
    subject = Subject(model="FLUX", latent=(1, 16, 128, 128), tokens={"image": 4096}, work=WORK)
    one = Pace(setup=RunSetup(kind="cuda"), seconds=0.9)
    both = Pace(setup=RunSetup.of(two.degrees, two.placement), seconds=0.5, speedup=1.8)
    made = report(subject, two, guided=False, automatic=False, pace=both, paces=(one, both))
    first, second = made.text.splitlines()[:2]
    assert first.startswith("Speed: 2 GPUs: 0.50 s per step, 1.8 x")
    assert second.startswith("Speed: 0.90 s per step on 1 worker(s)")
    assert "0.50" not in second
    assert [title for title, _ in made.table["rows"]].count("Speed") == 1
