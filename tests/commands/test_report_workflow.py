"""A workflow in a bug report has what it takes to run it, and nothing that is private."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from parallel_runtime.commands.saved_graph import summary
from parallel_runtime.errors import Refused
from parallel_runtime.request import widgets

from ..comfyui.comfy import OUR_ROOT, find_comfy, why_there_is_none
from .test_report import main

SECRET = "a portrait of my neighbour"
FILE = "private/secret_mix_v3.safetensors"


def api() -> dict[str, Any]:
    return {
        "1": {"class_type": "UNETLoader", "inputs": {"unet_name": FILE, "weight_dtype": "fp8_e4m3fn"}},
        "2": {"class_type": "CLIPTextEncode", "inputs": {"text": SECRET, "clip": ["7", 0]}, "_meta": {"title": SECRET}},
        "3": {"class_type": "KSampler", "inputs": {
            "model": ["1", 0], "positive": ["2", 0], "seed": 7, "cfg": 2.5, "sampler_name": "dpmpp_2m"}},
    }  # fmt: skip


def canvas() -> dict[str, Any]:
    def widget(name: str) -> dict[str, Any]:
        return {"name": name, "type": "X", "widget": {"name": name}, "link": None, "localized_name": SECRET}

    names = ("seed", "steps", "cfg", "sampler_name")
    nodes = [
        {"id": 1, "type": "UNETLoader", "title": SECRET, "widgets_values": [FILE, "default"],
         "inputs": [widget("unet_name"), widget("weight_dtype")], "properties": {"models": [{"name": FILE}]}},
        {"id": 2, "type": "MarkdownNote", "widgets_values": [SECRET]},
        {"id": 3, "type": "KSampler", "mode": 4,
         "inputs": [{"name": "model", "type": "MODEL", "link": 9}, *map(widget, names)],
         "widgets_values": [7, "randomize", 20, 2.5, "dpmpp_2m"], "properties": {"cnr_id": "comfy-core", "ver": "0.3"}},
    ]  # fmt: skip
    inner = {"id": "abc", "name": SECRET, "nodes": nodes, "links": [], "inputs": [], "outputs": []}
    return {
        "nodes": nodes, "links": [[9, 1, 0, 3, 0, "MODEL"]], "groups": [{"title": SECRET}], "extra": {"info": SECRET},
        "definitions": {"subgraphs": [inner]},
    }  # fmt: skip


@pytest.mark.parametrize("workflow", [api(), canvas(), {"prompt": api()}], ids=["API", "canvas", "prompt"])
def test_no_text_title_note_or_file_is_in_it(workflow: dict[str, Any]) -> None:
    text = json.dumps(summary(workflow, lambda name: "Flux" if name == FILE else ""))
    assert "neighbour" not in text
    assert "secret" not in text
    assert "Flux.safetensors" in text


def test_numbers_choices_links_and_versions_stay() -> None:
    made = summary(api(), lambda _: "")
    assert made["3"]["inputs"] == api()["3"]["inputs"]
    assert made["1"]["inputs"] == {"unet_name": "file.safetensors", "weight_dtype": "fp8_e4m3fn"}
    assert made["2"]["inputs"]["text"] == f"text of {len(SECRET)} characters"
    sampler = summary(canvas(), lambda _: "")["nodes"][2]
    assert sampler["widgets_values"] == canvas()["nodes"][2]["widgets_values"]
    assert sampler["properties"] == {"cnr_id": "comfy-core", "ver": "0.3"}
    assert (sampler["mode"], sampler["inputs"][0]["link"]) == (4, 9)


def test_every_choice_of_a_cp_parallel_config_stays() -> None:
    choices = {widget.name: widget.default for widget in widgets() if widget.options}
    assert "comm_dtype" in choices
    made = summary({"1": {"class_type": "CPParallelConfig", "inputs": choices}}, lambda _: "")
    assert made["1"]["inputs"] == choices


@pytest.mark.parametrize("workflow", [[], {}, {"1": {"inputs": {}}}, 7])
def test_what_is_no_workflow_is_refused(workflow: Any) -> None:
    with pytest.raises(Refused, match="neither as ComfyUI saves it"):
        summary(workflow, lambda _: "")


def test_the_command_writes_it_and_says_what_it_contains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(canvas()))
    assert main("--workflow", str(file), "--out", str(tmp_path / "issue")) == 0
    report = json.loads((tmp_path / "issue.workflow.json").read_text())
    assert report["workflow"]["nodes"]
    assert report["versions"]["torch"]


def test_what_comfyui_tells_of_its_start_is_left_out(tmp_path: Path) -> None:
    """Its own detection names the classes of networks."""
    if (comfy := find_comfy()) is None:
        pytest.skip(why_there_is_none())
    (tmp_path / "mine.json").write_text(json.dumps(canvas()))
    line = [comfy.python, "-m", "parallel_runtime", "report", "--workflow", tmp_path / "mine.json"]
    line += ["--comfyui", comfy.root, "--out", tmp_path / "issue"]
    done = subprocess.run(line, cwd=OUR_ROOT, capture_output=True, text=True, timeout=300, check=True)
    (said,) = done.stdout.splitlines()
    assert said.startswith(f"written: {tmp_path / 'issue'}.workflow.json. ")


@pytest.mark.parametrize("text", ["{", None], ids=["no JSON", "no file"])
def test_a_file_that_cannot_be_read_is_one_sentence(
    text: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "mine.json"
    if text is not None:
        file.write_text(text)
    with caplog.at_level("INFO"):
        assert main("--workflow", str(file), "--out", str(tmp_path)) == 1
    assert "cannot be read as JSON" in caplog.text
    assert str(file) in caplog.text
