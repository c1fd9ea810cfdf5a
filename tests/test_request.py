"""What a CP Parallel Config says is read in one place, whoever says it: a node, a queued prompt, or the page."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from parallel_runtime.errors import Refused
from parallel_runtime.group import machines
from parallel_runtime.planning.candidates import default_plan
from parallel_runtime.planning.network_stats import NetworkStats
from parallel_runtime.planning.run_plan import PlanInputs
from parallel_runtime.request import EngineOptions, ParallelRequest, Widget, parse_devices, requested_shares, widgets
from parallel_runtime.specs import DEGREES, ModelSpec, WeightPlacement
from parallel_runtime.wire.messages import Run, decode, encode

ROOT = Path(__file__).parents[1]


def test_values_are_taken_by_name_and_the_rest_is_as_usual() -> None:
    request = ParallelRequest.of({"ring_degree": 2, "weights": "shard", "step_cache": 0, "a_widget_of_others": [1]})
    assert request == ParallelRequest(ring_degree=2, weights="shard", options=EngineOptions(step_cache=0))
    assert ParallelRequest.of({}) == ParallelRequest()
    assert ParallelRequest.of(request.values) == request


def test_default_degrees_keep_all_that_divides_nothing() -> None:
    kept = {"compile": "on", "weights": "shard", "step_cache": 0.1, "devices": "0,1", "warmup_steps": 3}
    request = ParallelRequest.of({**kept, "ring_degree": 2, "pipeline_degree": 2, "shares": "3,2", "patches": 4})
    assert request.with_default_degrees == ParallelRequest.of(kept)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("ring_degree", "three", "is not a whole number; set it to 0"),
        ("ring_degree", True, "is not a whole number; set it to 0"),
        ("ring_degree", 2.0, "is not a whole number; set it to 0"),
        ("ring_degree", ["4", 0], "is not a whole number; set it to 0"),
        ("data_degree", None, "is not a whole number; set it to 0"),
        ("convert_to_fp32", 1, "is not true or false; set it to True"),
        ("devices", 0, "is not a text; set it to ''"),
        ("step_cache", "0.1", "is not a number; set it to 0.0"),
        ("step_cache", True, "is not a number; set it to 0.0"),
        ("step_cache", math.nan, "is not a number; set it to 0.0"),
        ("rotate_method", "zig", "is unknown: choose one of alltoall, allgather, auto"),
        ("rotate_method", ["alltoall"], "is unknown: choose one of alltoall, allgather, auto"),
        ("compile", False, "is unknown: choose one of off, on"),
        ("comm_dtype", "float8_e5m2", "is unknown: choose one of same, float8_e4m3fn"),
    ],
)
def test_what_a_widget_cannot_hold_is_refused_by_name_with_what_it_can(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(Refused) as refused:
        ParallelRequest.of({name: value})
    assert str(refused.value) == f"{name} {value!r} {wanted}"
    assert ParallelRequest.of(refused.value.fix) == ParallelRequest()


@pytest.mark.parametrize(
    ("name", "value", "nearest", "wanted"),
    [
        ("ring_degree", -1, 0, "ring_degree -1 is out of range: set it to 0 to 64"),
        ("ulysses_degree", 2**40, 64, "ulysses_degree 1099511627776 is out of range: set it to 0 to 64"),
        ("cfg_degree", 3, 2, "cfg_degree 3 is out of range: set it to 0 to 2"),
        ("data_degree", -1, 0, "data_degree -1 is out of range: set it to 0 to 64"),
        ("pipeline_degree", 65, 64, "pipeline_degree 65 is out of range: set it to 0 to 64"),
        ("nnodes", 0, 1, "nnodes 0 is out of range: set it to 1 to 64"),
        ("patches", 0, 1, "patches 0 is out of range: set it to 1 to 64"),
        ("warmup_steps", 0, 1, "warmup_steps 0 is out of range: set it to 1 to 1000"),
        ("step_cache", -0.1, 0.0, "step_cache -0.1 is out of range: set it to 0.0 to 1.0"),
        ("step_cache", math.inf, 1.0, "step_cache inf is out of range: set it to 0.0 to 1.0"),
    ],
)
def test_a_number_out_of_range_is_refused_with_the_nearest_one_that_works(
    name: str, value: float, nearest: float, wanted: str
) -> None:
    with pytest.raises(Refused) as refused:
        ParallelRequest.of({name: value})
    assert str(refused.value) == wanted
    assert (refused.value.widget, refused.value.fix) == (name, {name: nearest})
    json.dumps(refused.value.values, allow_nan=False)  # a browser reads it
    assert ParallelRequest.of(refused.value.fix).values[name] == nearest


def test_every_number_has_limits() -> None:
    assert {row.name for row in widgets() if not row.limits} == {
        row.name for row in widgets() if row.options or row.kind in (str, bool)
    }


def of_widget(name: str, text: str) -> ParallelRequest:
    return ParallelRequest.of({name: text})


@pytest.mark.parametrize("text", ["x" * 20_000, "7" * 20_000, "7," * 9_999 + "7"])
@pytest.mark.parametrize(
    "refusing",
    [
        *(partial(of_widget, row.name) for row in widgets() if row.options or row.kind is not str),
        partial(requested_shares, workers=2),
        partial(parse_devices, gpus=2),
        lambda text: parse_devices(f"cpu,{text}", 2),
        machines.split_endpoint,
        lambda text: machines.parse_endpoint(f"{text}.invalid:29500"),
    ],
)
def test_of_a_long_text_a_refusal_quotes_the_beginning(refusing: Callable[[str], object], text: str) -> None:
    with pytest.raises(Refused) as refused:
        refusing(text)
    assert len(str(refused.value)) < 300


def test_what_is_empty_is_also_called_auto() -> None:
    assert ParallelRequest.of({"devices": "auto", "rdzv_endpoint": "auto"}) == ParallelRequest()


@pytest.mark.parametrize("values", [None, [], "ring_degree", 2])
def test_what_is_no_object_is_no_config(values: Any) -> None:
    with pytest.raises(Refused, match="expected an object of widget values"):
        ParallelRequest.of(values)


@pytest.mark.parametrize(
    ("degrees", "by_heads"), [((0, 0), False), ((2, 0), True), ((0, 2), False), ((2, 1), False), ((1, 0), True)]
)
def test_how_many_workers_are_needed_depends_on_heads_beside_a_ring_that_is_given(
    degrees: tuple[int, int], by_heads: bool
) -> None:
    ring, ulysses = degrees
    assert ParallelRequest(ring_degree=ring, ulysses_degree=ulysses).by_heads == by_heads


@pytest.mark.parametrize(
    ("degrees", "workers", "known"),
    [
        ((0, 0, 0, 0, 1), 4, (0, 0, 0, 0, 1)),
        ((0, 2, 0, 0, 1), 2, (1, 2, 1, 1, 1)),
        ((0, 2, 0, 0, 1), 4, (0, 2, 0, 0, 1)),
        ((0, 2, 1, 1, 1), 6, (3, 2, 1, 1, 1)),
        ((0, 0, 0, 0, 1), 1, (1, 1, 1, 1, 1)),
        ((1, 1, 2, 1, 0), 4, (1, 1, 2, 1, 2)),
    ],
)
def test_a_degree_is_known_without_a_model_if_the_others_leave_no_choice(
    degrees: tuple[int, ...], workers: int, known: tuple[int, ...]
) -> None:
    request = ParallelRequest.of(dict(zip(DEGREES, degrees, strict=True)))
    assert request.degrees_without_model(workers) == dict(zip(DEGREES, known, strict=True))


def test_the_places_of_widgets_are_without_gaps_since_workflows_hold_values_by_them() -> None:
    assert [row.place for row in widgets()] == list(range(1, len(widgets()) + 1))
    assert ParallelRequest().values == {row.name: row.default for row in widgets()}


STAGES = {"ulysses_degree": 1, "pipeline_degree": 2}
CHANGED: dict[str, dict[str, Any]] = {  # each option with another value than its default, and what it needs
    "rotate_method": {"ring_degree": 2, "rotate_method": "allgather"},
    "convert_to_fp32": {"ring_degree": 2, "convert_to_fp32": False},
    "attention_backend": {"ring_degree": 2, "attention_backend": "native"},
    "step_cache": {"ring_degree": 2, "step_cache": 0.1},
    "cuda_graphs": {"ring_degree": 2, "cuda_graphs": "off"},
    "comm_dtype": {"ring_degree": 2, "comm_dtype": "float8_e4m3fn"},
    "patches": {**STAGES, "patches": 4},
    "warmup_steps": {**STAGES, "patches": 4, "warmup_steps": 3},
}


@pytest.mark.parametrize("row", [row for row in widgets() if row.of_engine], ids=lambda row: row.name)
def test_every_option_of_the_engine_arrives_on_a_worker_as_its_widget_says(row: Widget) -> None:
    asked = {"devices": "cpu,cpu", **CHANGED[row.name]}
    degrees = default_plan(
        PlanInputs(request=ParallelRequest.of(asked), network=NetworkStats(heads=24), gpus=2)
    ).degrees
    message = decode(encode(Run(1, ModelSpec(loader="any"), degrees, WeightPlacement())))
    assert getattr(message.parallelism.options, row.field) == asked[row.name] != row.default


ROW = """    eagerness: int = widget({place}, 0, "A new option.", limits={{"min": 0, "max": 9}})
"""
NEW_OPTION = """
from parallel_runtime.planning.candidates import default_plan
from parallel_runtime.planning.network_stats import NetworkStats
from parallel_runtime.planning.run_plan import PlanInputs
from parallel_runtime.request import ParallelRequest, widgets
from parallel_runtime.specs import DEGREES, ModelSpec, WeightPlacement
from parallel_runtime.wire.messages import Run, decode, encode

request = ParallelRequest.of({"devices": "cpu,cpu", "ring_degree": 2, "eagerness": 7})
degrees = default_plan(PlanInputs(request=request, network=NetworkStats(heads=24), gpus=2)).degrees
message = decode(encode(Run(1, ModelSpec(loader="any"), degrees, WeightPlacement())))
print(widgets()[-1].name, request.values["eagerness"], message.parallelism.options.eagerness)
"""


def test_a_new_option_is_one_row_and_arrives_on_a_worker_without_another_line(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "parallel_runtime", tmp_path / "parallel_runtime", ignore=shutil.ignore_patterns("*.pyc"))
    shutil.copytree(ROOT / "locales", tmp_path / "locales")
    code = tmp_path / "parallel_runtime" / "request.py"
    before, row_of_another, after = code.read_text().partition("    convert_to_fp32: bool = widget(")
    code.write_text(before + ROW.format(place=len(widgets()) + 1) + row_of_another + after)
    command = [sys.executable, "-c", NEW_OPTION]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["eagerness", "7", "7"]


@pytest.mark.parametrize("row", widgets(), ids=lambda row: row.name)
def test_every_widget_has_its_help_and_a_tooltip_in_each_language(row: Widget) -> None:
    help_page = (ROOT / "web" / "docs" / "CPParallelConfig.md").read_text(encoding="utf-8")
    assert f"| {row.name} |" in help_page
    languages = list((ROOT / "locales").glob("*/nodeDefs.json"))
    assert len(languages) == 7, "English is in the row itself"
    for words in languages:
        assert json.loads(words.read_text(encoding="utf-8"))["CPParallelConfig"]["inputs"][row.name]["tooltip"]
