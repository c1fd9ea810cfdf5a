"""What CP nodes do with ComfyUI's own workflows is read off them, and nothing that is new there passes for known."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from .comfy import ComfyInstall
from .stock import read, stock, table, table_of_new, templates_in
from .stock_verdicts import class_of

Json = dict[str, Any]


def node(number: int, kind: str, values: list[Any], outputs: str = "", **inputs: tuple[str, int]) -> Json:
    """`inputs`: the type of each socket, and the number of its link."""
    sockets = [{"name": name, "type": of, "link": link} for name, (of, link) in inputs.items()]
    given = [{"name": outputs, "type": outputs}] if outputs else []
    return {"id": number, "type": kind, "widgets_values": values, "inputs": sockets, "outputs": given}


def canvas(file: str, *between: Json, cfg: float = 4.0, controlled: bool = False) -> Json:
    """A loader (its link is 1), what is on the way from it, and a KSampler at link 9; the prompt is link 5."""
    text = "ControlNetApplyAdvanced" if controlled else "CLIPTextEncode"
    nodes = [
        node(1, "UNETLoader", [file], "MODEL"),
        *between,
        node(2, text, [], "CONDITIONING"),
        node(3, "KSampler", [1, "fixed", 20, cfg], model=("MODEL", 9), positive=("CONDITIONING", 5)),
    ]
    last = between[-1]["id"] if between else 1
    return {"nodes": nodes, "links": [[1, 1, 0, 0, 0, "MODEL"], [9, last, 0, 3, 0, "MODEL"], [5, 2, 0, 3, 1, "X"]]}


def patch(kind: str) -> Json:
    return node(7, kind, [], "MODEL", model=("MODEL", 1))


@pytest.mark.parametrize(
    ("workflow", "outcome", "why"),
    [
        (canvas("flux1-dev.safetensors"), "divided", ""),
        (canvas("flux1-dev.safetensors", patch("LoraLoaderModelOnly")), "divided", ""),
        (canvas("wan2.2_i2v_14B_fp8_scaled.safetensors", controlled=True), "divided", ""),
        (canvas("sd_xl_base_1.0.safetensors"), "divided", ""),
        (canvas("sd_xl_base_1.0.safetensors", patch("HyperTile")), "divided", ""),
        (canvas("seedvr2_3b.safetensors"), "by groups", "NaDiT has no plan"),
        (canvas("seedvr2_3b.safetensors", cfg=1), "undivided", "NaDiT has no plan"),
        (canvas("flux1-dev.safetensors", patch("HyperTile")), "undivided", "attn1_patch of HyperTile"),
        (canvas("flux1-dev.safetensors", patch("SomethingNew")), "not known", "SomethingNew"),
        (canvas("a_new_network.safetensors"), "not known", "file's name"),
        (canvas("qwen_image_2.1_int8_convrot.safetensors", patch("QwenImage21Cache")), "divided", ""),
        (canvas("flux3-image-klein-base.safetensors"), "by groups", "FLUX.3 Klein has no plan"),
        (canvas("minimax_h3_fl2va.safetensors", patch("MiniMaxH3FunControlNetApply")), "divided", ""),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_workflow_is_told_by_its_nodes_and_its_file(workflow: Json, outcome: str, why: str) -> None:
    worst = read("one", workflow).worst
    assert worst is not None
    assert worst.outcome == outcome
    assert why in worst.why


def test_a_model_reaches_a_sampler_inside_of_subgraphs_and_past_what_is_bypassed() -> None:
    inner = {
        "id": "inside",
        "inputs": [{"name": "unet"}],
        "nodes": [node(3, "KSampler", [1, "fixed", 20, 4.0], model=("MODEL", 8))],
        "links": [{"id": 8, "origin_id": -10, "origin_slot": 0, "target_id": 3, "target_slot": 0}],
    }
    bypassed = patch("SomethingNew") | {"mode": 4}
    outer = {
        "nodes": [
            node(1, "UNETLoader", ["seedvr2_3b.safetensors"], "MODEL"),
            bypassed,
            node(5, "inside", [], unet=("MODEL", 9)),
        ],
        "links": [[1, 1, 0, 7, 0, "MODEL"], [9, 7, 0, 5, 0, "MODEL"]],
        "definitions": {"subgraphs": [inner]},
    }
    (verdict,) = read("nested", outer).of_samplers
    assert (verdict.network, verdict.outcome) == ("NaDiT", "by groups")


@pytest.mark.parametrize(("cfg", "outcome"), [(4.0, "by groups"), (1, "undivided")])
def test_a_sampler_with_a_socket_for_the_algorithm_has_its_cfg_in_the_same_place(cfg: float, outcome: str) -> None:
    workflow = canvas("seedvr2_3b.safetensors")
    workflow["nodes"][-1] |= {"type": "SamplerCustom", "widgets_values": [True, 0, "fixed", cfg]}
    assert [verdict.outcome for verdict in read("custom", workflow).of_samplers] == [outcome]


def test_longer_names_go_before_shorter_ones() -> None:
    assert class_of("pid_flux1_1024_to_4096_4step_bf16.safetensors") == "PidNet"
    assert class_of("some/folder/wan2.1_14B_SCAIL_2_fp16.safetensors") == "SCAIL2WanModel"
    assert class_of("wan_animate_2_int8_convrot.safetensors") == "WanAnimate2Model"


def test_a_newer_package_is_read_from_its_wheels_and_its_new_workflows_are_told(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "comfyui_workflow_templates_json-0.2-py3-none-any.whl", "w") as wheel:
        for name, file in {"old": "flux1-dev.safetensors", "new": "seedvr2_3b.safetensors"}.items():
            wheel.writestr(f"comfyui_workflow_templates_json/templates/{name}.json", json.dumps(canvas(file)))
        wheel.writestr("comfyui_workflow_templates_json/templates/index.json", "[]")
    with pytest.raises(LookupError, match="no wheels"):
        templates_in(tmp_path)
    zipfile.ZipFile(tmp_path / "comfyui_workflow_templates-0.3-py3-none-any.whl", "w").close()
    version, workflows = templates_in(tmp_path)
    assert (version, list(workflows)) == ("0.3", ["new", "old"])
    *_, last = table_of_new({"old"}, [read(name, one) for name, one in workflows.items()]).splitlines()
    assert last == "| new | NaDiT | by groups | NaDiT has no plan |"


def test_every_workflow_of_the_installed_package_is_migrated_and_known(comfy: ComfyInstall) -> None:
    version, reads = stock(comfy)
    assert len(reads) > 100
    assert [one.name for one in reads if one.worst and one.worst.outcome == "not known"] == []
    assert version in table(version, reads)
