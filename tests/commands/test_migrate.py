"""Saved workflows of both forms get CP nodes, and nothing else of them changes."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parallel_runtime.commands.migrate import NATIVE, OTHERS, REPLACEMENTS, migrated

ROOT = Path(__file__).resolve().parents[2]
API = {
    "3": {
        "class_type": "KSampler",
        "inputs": {"seed": 5, "model": ["4", 0], "denoise": 0.5},
        "_meta": {"title": "Mine"},
    },
    "4": {"class_type": "UNETLoader", "inputs": {"unet_name": "KSampler"}},
    "5": {"class_type": "SamplerCustomAdvanced", "inputs": {"noise": ["6", 0]}},
    "7": {"class_type": "KSamplerAdvanced", "inputs": {}},
    "8": {"class_type": "SamplerCustom", "inputs": {"model": ["4", 0], "cfg": 1.0}},
}


def node(number: int, kind: str) -> dict:
    return {
        "id": number,
        "type": kind,
        "title": "My title",
        "inputs": [
            {"name": "model", "type": "MODEL", "link": 9},
            {"name": "seed", "widget": {"name": "seed"}, "link": 3},
        ],
        "outputs": [{"name": "LATENT", "links": [4]}],
        "properties": {"Node name for S&R": kind, "cnr_id": "comfy-core", "ver": "0.3.40", "mine": 1},
        "widgets_values": [7, "randomize", 20, 4.5, "euler", "simple", 1],
    }


def canvas() -> dict:
    inner = {"id": "a-b", "name": "Refine", "nodes": [node(1, "KSamplerAdvanced")], "links": []}
    return {
        "nodes": [node(3, "KSampler"), node(4, "VAEDecode")],
        "links": [[9, 4, 0, 3, 0, "MODEL"]],
        "definitions": {"subgraphs": [inner]},
        "extra": {"groupNodes": {"Old group": {"nodes": [{"type": "SamplerCustomAdvanced", "index": 2}]}}},
        "version": 0.4,
    }


def test_a_prompt_for_the_api_changes_in_its_classes_only():
    before = copy.deepcopy(API)
    after, changes = migrated(API)
    assert before == API, "what was given is left alone"
    assert [str(change) for change in changes] == [
        "node 3: KSampler -> CPSampler",
        "node 5: SamplerCustomAdvanced -> CPSamplerCustom",
        "node 7: KSamplerAdvanced -> CPSamplerAdvanced",
        "node 8: SamplerCustom -> CPSamplerCustomBasic",
    ]
    for name, call in after.items():
        assert call.pop("class_type") == REPLACEMENTS.get(before[name]["class_type"], before[name]["class_type"])
        assert call == {key: value for key, value in before[name].items() if key != "class_type"}


def test_a_request_to_prompt_is_a_prompt_too():
    after, changes = migrated({"prompt": API, "client_id": "me"})
    assert len(changes) == 4
    assert after["client_id"] == "me"
    assert after["prompt"]["3"]["class_type"] == "CPSampler"


def test_a_canvas_changes_on_the_canvas_in_subgraphs_and_in_group_nodes():
    after, changes = migrated(canvas())
    assert [str(change) for change in changes] == [
        "node 3: KSampler -> CPSampler",
        "node 1 in subgraph 'Refine': KSamplerAdvanced -> CPSamplerAdvanced",
        "node 2 in group node 'Old group': SamplerCustomAdvanced -> CPSamplerCustom",
    ]
    swapped, untouched = after["nodes"]
    assert untouched == node(4, "VAEDecode")
    assert swapped["properties"] == {"Node name for S&R": "CPSampler", "mine": 1}
    assert swapped["inputs"][:2] == node(3, "KSampler")["inputs"]
    assert swapped["inputs"][2] == {"name": "cp_config", "type": "CP_CONFIG", "shape": 7, "link": None}
    for key in ("id", "title", "outputs", "widgets_values"):
        assert swapped[key] == node(3, "KSampler")[key]
    assert after["links"] == canvas()["links"]


CONFIG = {"id": 8, "type": "CPParallelConfig", "mode": 0, "outputs": [{"name": "cp_config", "links": None}]}


def test_the_one_config_of_a_graph_is_connected_and_a_second_one_leaves_the_choice() -> None:
    before = canvas()
    before["nodes"].append(copy.deepcopy(CONFIG))
    before["last_link_id"] = 9
    after, _ = migrated(before)
    assert after["links"][-1] == [10, 8, 0, 3, 2, "CP_CONFIG"]
    assert after["nodes"][0]["inputs"][2]["link"] == 10
    assert after["nodes"][2]["outputs"][0]["links"] == [10]
    assert after["last_link_id"] == 10
    inner = after["definitions"]["subgraphs"][0]
    assert inner["nodes"][0]["inputs"][2]["link"] is None, "a graph of its own"

    for other in ({**CONFIG, "id": 9}, None):
        twice = canvas()
        twice["nodes"] += [copy.deepcopy(CONFIG) if other else {**CONFIG, "mode": 4}, *([other] if other else [])]
        assert migrated(twice)[0]["links"] == canvas()["links"], "which of them, or one that is bypassed"


def test_a_subgraph_has_links_by_name() -> None:
    before = canvas()
    subgraph = before["definitions"]["subgraphs"][0]
    link = {"id": 4, "origin_id": -10, "origin_slot": 0, "target_id": 1, "target_slot": 0, "type": "MODEL"}
    subgraph |= {"links": [link], "state": {"lastLinkId": 6}}
    subgraph["nodes"].append(copy.deepcopy(CONFIG))
    after = migrated(before)[0]["definitions"]["subgraphs"][0]
    assert after["links"][1] == {
        "id": 5, "origin_id": 8, "origin_slot": 0, "target_id": 1, "target_slot": 2, "type": "CP_CONFIG",
    }  # fmt: skip
    assert after["state"] == {"lastLinkId": 6}


LINK = [3, 4, 0, 1, 0, "MODEL"]


@pytest.mark.parametrize(
    ("odd", "number"),
    [
        ({"links": [None, LINK]}, 4),
        ({"links": None}, 1),
        ({"links": [["3", "4", 0, "1", 0, "MODEL"]]}, 4),
        ({"links": [LINK], "last_link_id": None}, 4),
        ({"links": [], "state": {"lastLinkId": None}}, 1),
        ({"links": {"3": LINK}}, None),
    ],
    ids=str,
)
def test_links_of_any_form_are_gone_on_with_or_left_alone(odd: dict, number: int | None) -> None:
    sampler, config = node(1, "KSampler"), {**node(2, "CPParallelConfig"), "outputs": [{"name": "cp", "links": None}]}
    after, changes = migrated({"nodes": [sampler, config], **odd})
    assert len(changes) == 1
    assert after["nodes"][0]["inputs"][-1]["link"] == number
    assert after["nodes"][1]["outputs"][0]["links"] == (number and [number])


@pytest.mark.parametrize(("of", "odd"), [(0, {"inputs": None}), (1, {"outputs": []}), (1, {"outputs": None})], ids=str)
def test_a_node_without_sockets_is_swapped(of: int, odd: dict) -> None:
    nodes = [node(1, "KSampler"), node(2, "CPParallelConfig")]
    after, changes = migrated({"nodes": [{**each, **odd} if n == of else each for n, each in enumerate(nodes)]})
    assert len(changes) == 1
    assert (after["nodes"][0]["inputs"][-1]["link"] is None) == ("outputs" in odd)


def test_the_one_config_of_a_prompt_is_connected_where_there_are_no_inputs_yet() -> None:
    calls = {"1": {"class_type": "KSampler", "inputs": None}, "2": {"class_type": "CPParallelConfig", "inputs": {}}}
    assert migrated(calls)[0]["1"]["inputs"] == {"cp_config": ["2", 0]}


def test_the_one_config_of_a_prompt_is_connected() -> None:
    one = {**API, "8": {"class_type": "CPParallelConfig", "inputs": {}}}
    after, _ = migrated(one)
    assert [name for name, call in after.items() if call["inputs"].get("cp_config") == ["8", 0]] == ["3", "5", "7"]
    two = migrated({**one, "9": one["8"]})[0]
    assert not any("cp_config" in call["inputs"] for call in two.values())


def test_twice_is_once():
    once, _ = migrated(canvas())
    assert migrated(once) == (once, [])


def test_there_and_back_is_the_workflow_that_it_was() -> None:
    before = canvas()
    before["nodes"].append({**copy.deepcopy(CONFIG), "outputs": [{"name": "cp_config", "links": None}]})
    converted, changes = migrated(before)
    back, changes_back = migrated(converted, back=True)
    assert [(one.node, one.place, one.after) for one in changes_back] == [
        (one.node, one.place, one.before) for one in changes
    ]
    for graph in (before, before["definitions"]["subgraphs"][0], before["extra"]["groupNodes"]["Old group"]):
        for one in (one for one in graph["nodes"] if one["type"] in REPLACEMENTS):
            one.setdefault("inputs", [])
            for name in ("cnr_id", "ver"):  # of ComfyUI's own node, and not written again
                one.get("properties", {}).pop(name, None)
    assert back == before
    prompt = {**API, "9": {"class_type": "CPParallelConfig", "inputs": {}}}
    assert migrated(migrated(prompt)[0], back=True)[0] == prompt


def test_sockets_behind_the_config_keep_their_links() -> None:
    """ComfyUI saves cp_config before the sockets of widgets."""
    sampler = node(1, "CPSampler")
    sampler["inputs"].insert(1, {"name": "cp_config", "type": "CP_CONFIG", "link": 5})
    config = {**copy.deepcopy(CONFIG), "outputs": [{"name": "cp_config", "links": [5, 6]}]}
    links = [
        [9, 4, 0, 1, 0, "MODEL"],
        [5, 8, 0, 1, 1, "CP_CONFIG"],
        [3, 4, 1, 1, 2, "INT"],
        [6, 8, 0, 7, 1, "CP"],
        None,
    ]
    after, _ = migrated({"nodes": [sampler, config], "links": links}, back=True)
    assert after["links"] == [[9, 4, 0, 1, 0, "MODEL"], [3, 4, 1, 1, 1, "INT"], [6, 8, 0, 7, 1, "CP"], None]
    assert [socket["name"] for socket in after["nodes"][0]["inputs"]] == ["model", "seed"]
    assert after["nodes"][1]["outputs"][0]["links"] == [6]


ODD = [None, [], {}, "x", "7", 5, -1, 1.5, True, [None], {"a": 1}, [3, 4, 0, 1]]


def with_encoder(loader: str = "CLIPLoader", file: str = "large.safetensors") -> dict:
    """A canvas, or what is inside a subgraph: a loader of a text encoder, two prompts, and a sampler of them."""

    def made(number: int, kind: str, inputs: list, outputs: list, pos: list, **more: Any) -> dict:
        sockets = [{"name": name, "type": of, "link": link} for name, of, link in inputs]
        outs = [{"name": of, "type": of, "links": links} for of, links in outputs]
        return {"id": number, "type": kind, "pos": pos, "size": [200, 100], "inputs": sockets, "outputs": outs, **more}

    prompts = [
        made(number, "CLIPTextEncode", [["clip", "CLIP", link]], [["CONDITIONING", [link + 2]]], [0, y])
        for number, link, y in ((2, 1, 180), (3, 2, 600))
    ]
    sampler = made(4, "KSampler", [["positive", "CONDITIONING", 3], ["negative", "CONDITIONING", 4]], [], [900, 0])
    return {
        "nodes": [
            made(1, loader, [], [["CLIP", [1, 2]]], [0, 0], widgets_values=[file, "flux2"]),
            *prompts,
            sampler,
            {**copy.deepcopy(CONFIG), "outputs": [{"name": "cp_config", "links": None}]},
        ],
        "links": [
            [1, 1, 0, 2, 0, "CLIP"], [2, 1, 0, 3, 0, "CLIP"], [3, 2, 0, 4, 0, "CONDITIONING"],
            [4, 3, 0, 4, 1, "CONDITIONING"],
        ],
        "last_node_id": 11,
        "last_link_id": 4,
    }  # fmt: skip


def large(names: list[str]) -> bool:
    return "large.safetensors" in names


def test_a_large_text_encoder_gets_a_cp_clip_and_loses_it_on_the_way_back() -> None:
    before = with_encoder()
    after, changes = migrated(before, large=large)
    assert [*map(str, changes)] == ["node 4: KSampler -> CPSampler", "node 12: CPCLIP added"]
    made = after["nodes"][-1]
    assert (made["id"], made["type"]) == (after["last_node_id"], "CPCLIP") == (12, "CPCLIP")
    assert made["pos"] == [0, 350], "below the loader and the prompt that lies there"
    assert [link for link in after["links"] if 12 in link[1:4]] == [
        [1, 12, 0, 2, 0, "CLIP"], [2, 12, 0, 3, 0, "CLIP"], [6, 1, 0, 12, 0, "CLIP"], [7, 8, 0, 12, 1, "CP_CONFIG"],
    ]  # fmt: skip
    assert after["nodes"][0]["outputs"][0]["links"] == [6]
    assert made["outputs"][0]["links"] == [1, 2]
    assert [socket["link"] for socket in made["inputs"]] == [6, 7]
    assert migrated(after, large=large)[1] == [], "twice is once"

    back, changes = migrated(after, back=True)
    assert [*map(str, changes)] == ["node 4: CPSampler -> KSampler", "node 12: CPCLIP taken away"]
    assert back == {**before, "last_node_id": 12, "last_link_id": 7}


def test_a_large_text_encoder_in_a_subgraph_or_from_its_border_is_found() -> None:
    inner = with_encoder()
    state = {"lastNodeId": inner.pop("last_node_id"), "lastLinkId": inner.pop("last_link_id")}
    names = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
    inner |= {
        "name": "Refine",
        "state": state,
        "links": [dict(zip(names, link, strict=True)) for link in inner["links"]],
    }
    before = {"nodes": [], "definitions": {"subgraphs": [inner]}}
    after, changes = migrated(before, large=large)
    assert str(changes[1]) == "node 12 in subgraph 'Refine': CPCLIP added"
    subgraph = after["definitions"]["subgraphs"][0]
    assert subgraph["state"] == {"lastNodeId": 12, "lastLinkId": 7}
    assert subgraph["links"][0]["origin_id"] == 12
    back = migrated(after, back=True)[0]["definitions"]["subgraphs"][0]
    assert back == {**inner, "state": subgraph["state"]}

    del subgraph["nodes"][0]  # the CLIP comes from outside
    for link in subgraph["links"]:
        link["origin_id"] = -10 if link["origin_id"] == 1 else link["origin_id"]
    subgraph["inputs"] = [{"name": "clip", "linkIds": [6]}]
    back = migrated(after, back=True)[0]["definitions"]["subgraphs"][0]
    assert back["inputs"] == [{"name": "clip", "linkIds": [1, 2]}]
    assert [link["origin_id"] for link in back["links"][:2]] == [-10, -10]
    assert [
        change.after for change in migrated({"nodes": [], "definitions": {"subgraphs": [back]}}, large=large)[1]
    ] == ["CPSampler"]


def test_a_prompt_for_the_api_gets_a_cp_clip_and_loses_it_on_the_way_back() -> None:
    prompt = {
        "1": {"class_type": "DualCLIPLoader", "inputs": {"clip_name1": "large.safetensors", "clip_name2": "b"}},
        "2": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 0], "text": "large.safetensors"}},
        "7:3": {"class_type": "KSampler", "inputs": {"positive": ["2", 0], "seed": 5}},
        "20": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["21", 0]}},
        "21": {"class_type": "CLIPLoader", "inputs": {"clip_name": "large.safetensors"}},
        "22": {"class_type": "CPParallelConfig", "inputs": {}},
    }
    after, changes = migrated(prompt, large=large)
    assert [*map(str, changes)] == ["node 7:3: KSampler -> CPSampler", "node 23: CPCLIP added"]
    assert after["23"]["inputs"] == {"clip": ["1", 0], "cp_config": ["22", 0]}
    assert after["2"]["inputs"]["clip"] == ["23", 0]
    assert after["20"] == prompt["20"], "no sampler needs it"
    assert migrated(after, back=True)[0] == prompt


def test_a_small_text_encoder_and_one_in_the_workers_already_get_no_cp_clip() -> None:
    for workflow in (with_encoder(file="small.safetensors"), with_encoder("CPLoadCLIP")):
        assert [change.after for change in migrated(workflow, large=large)[1]] == ["CPSampler"]
    prompt = {
        "1": {"class_type": "CPLoadCLIP", "inputs": {"clip_name1": "large.safetensors"}},
        "2": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 0]}},
        "3": {"class_type": "KSampler", "inputs": {"positive": ["2", 0]}},
    }
    assert [change.after for change in migrated(prompt, large=large)[1]] == ["CPSampler"]


@pytest.mark.parametrize("back", [False, True])
def test_a_damaged_file_is_migrated_or_refused_with_a_sentence(back: bool) -> None:
    whole = {**canvas(), "last_link_id": 9, "links": [[5, 8, 0, 1, 0, "CP_CONFIG"], LINK]}
    whole["nodes"].append({**copy.deepcopy(CONFIG), "outputs": [{"name": "cp_config", "links": [5]}]})
    prompt = {**API, "9": {"class_type": "CPParallelConfig", "inputs": {}}}
    encoder = with_encoder()
    graphs = (whole, prompt, migrated(whole)[0], migrated(prompt)[0], encoder, migrated(encoder, large=large)[0])
    for graph in graphs:
        for *owners, last in places(graph):
            for odd in ODD:
                damaged = copy.deepcopy(graph)
                functools.reduce(lambda value, key: value[key], owners, damaged)[last] = odd
                with contextlib.suppress(ValueError):
                    migrated(damaged, back=back, large=large)


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to each value in this JSON."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*above, key)
        yield from places(part, (*above, key))


@pytest.mark.parametrize("content", [[], "text", {}, {"a": 1}, {"1": {"inputs": {}}}, {"nodes": {}}, {"1": None}])
def test_what_is_no_workflow_is_refused(content):
    with pytest.raises(ValueError, match="workflow"):
        migrated(content)


def test_odd_parts_are_passed_by():
    odd = {"nodes": [None, {"type": 3}, node(3, "KSampler")], "definitions": [], "extra": {"groupNodes": []}}
    assert len(migrated(odd)[1]) == 1


def command(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "parallel_runtime", "migrate", *arguments]
    return subprocess.run(line, cwd=ROOT, input=stdin, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_writes_beside_the_file_and_says_what_it_did(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(API))
    done = command(str(path))
    assert done.returncode == 0
    assert "node 3: KSampler -> CPSampler" in done.stderr
    assert f"written to {tmp_path / 'mine.cp.json'}" in done.stderr
    assert f"writes over {tmp_path / 'mine.cp.json'}" in command(str(path)).stderr
    assert json.loads(path.read_text()) == API
    assert json.loads((tmp_path / "mine.cp.json").read_text()) == migrated(API)[0]


def test_the_command_reads_sizes_in_the_folder_of_models_and_an_option_says_that_any_is_large(tmp_path: Path) -> None:
    path, folder = tmp_path / "mine.json", tmp_path / "models" / "clip" / "sub"
    path.write_text(json.dumps(with_encoder(file="sub/large.safetensors")))
    folder.mkdir(parents=True)
    (folder / "large.safetensors").touch()
    models = ("--models", str(tmp_path / "models"))
    assert "CPCLIP" not in command(str(path), *models).stderr
    assert "node 12: CPCLIP added" in command(str(path), *models, "--clip").stderr
    os.truncate(folder / "large.safetensors", 4 * 10**9 + 1)
    assert "node 12: CPCLIP added" in command(str(path), *models).stderr


def test_the_way_back_and_back_again_write_no_file_over_the_one_they_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(API))
    assert command(str(path)).returncode == 0
    done = command("--back", str(tmp_path / "mine.cp.json"))
    assert "node 3: CPSampler -> KSampler" in done.stderr
    assert json.loads((tmp_path / "mine.native.json").read_text()) == API
    (tmp_path / "mine.cp.json").write_text(json.dumps(API))
    failed = command(str(tmp_path / "mine.cp.json"))
    assert failed.returncode == 1
    assert "mine.cp.json would be overwritten; -o names the file to write" in failed.stderr


def test_nothing_to_change_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.cp.json").write_text(json.dumps(migrated(API)[0]))
    done = command(str(tmp_path / "mine.cp.json"))
    assert done.returncode == 0
    assert "there is no KSampler, KSamplerAdvanced," in done.stderr
    assert "nothing written" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.cp.json"]
    assert json.loads(command("-", stdin=json.dumps({"1": {"class_type": "X"}})).stdout) == {"1": {"class_type": "X"}}


def test_a_place_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "mine.json").write_text(json.dumps(API))
    failed = command(str(tmp_path / "mine.json"), "-o", str(tmp_path / "nowhere" / "mine.json"))
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].endswith("mine.json: No such file or directory; -o names another place")


def test_the_command_works_in_a_pipe_and_says_why_it_cannot(tmp_path):
    done = command("-", stdin=json.dumps(API))
    assert json.loads(done.stdout) == migrated(API)[0]
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "picture.jpg").write_bytes(b"\xff\xd8")
    for path, says in (
        ("broken.json", "is not JSON"),
        ("missing.json", "No such file"),
        ("picture.jpg", "is not JSON"),
    ):
        failed = command(str(tmp_path / path))
        assert failed.returncode == 1
        assert path in failed.stderr
        assert says in failed.stderr
        assert "Traceback" not in failed.stderr


def test_a_title_that_nobody_chose_follows_the_class() -> None:
    calls = {"1": {"class_type": "KSampler", "inputs": {}, "_meta": {"title": "KSampler"}}}
    after = migrated(calls)[0]
    assert after["1"]["_meta"] == {"title": "CPSampler"}
    assert migrated(after, back=True)[0] == calls


def test_the_way_back_names_the_nodes_of_this_pack_that_are_left(tmp_path: Path) -> None:
    calls = {"3": {"class_type": "CPSampler", "inputs": {}}, "4": {"class_type": "CPVAE", "inputs": {}},
             "5": {"class_type": "VAEDecode", "inputs": {}}}  # fmt: skip
    inner = {"name": "inner", "nodes": [{"id": 1, "type": "CPModel"}, {"id": 2, "type": "CPSampler"}]}
    saved = {"nodes": [{"id": 7, "type": "CPPlan"}, {"id": 8, "type": "Note"}], "definitions": {"subgraphs": [inner]}}
    for workflow, left in ((calls, "node 4 (CPVAE)"), (saved, "node 7 (CPPlan), node 1 in subgraph 'inner' (CPModel)")):
        path = tmp_path / "mine.cp.json"
        path.write_text(json.dumps(workflow))
        said = command("--back", str(path)).stderr
        assert f"nodes that are left: {left}; take them out, or keep" in said
        assert "does not say which samplers were ComfyUI's own before: now all of them are" in said
        assert "that are left" not in command(str(path)).stderr


def test_every_node_of_this_pack_is_a_sampler_or_one_that_is_named() -> None:
    page = (Path(__file__).parents[2] / "docs" / "scripts.md").read_text(encoding="utf-8")
    names = set(re.findall(r"\bCP[A-Z]\w+", page.partition("## Names")[2]))
    assert {*OTHERS, *NATIVE} == names
