"""Compare says whether one step on the workers is ComfyUI's own, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from .client import Graph, Interrupted, NodeError
from .comfy import OUR_ROOT
from .graphs import Parallel, longer, sampling_graph, with_loras
from .latents import apart, latent_of
from .server import Server
from .test_foreign import FLUX, WAN, Picture, hooked, on_the_model, plain, with_the_guider, with_the_sampler
from .test_kin import ALGORITHMS, GUIDERS, custom, link, node, on_the_loader
from .test_packs import SPLIT, behind_cp_model, code, code_on_a_unet

LINE = re.compile(r"Compare: (?P<node>.+?): (?P<verdict>equal to rounding|NOT equal|approximate|no proof|no step)")


def comparing(graph: Graph) -> Graph:
    """The graph as `report --compare` runs it: nothing else is asked for."""
    return {**{name: one for name, one in graph.items() if name != "save"}, "compare": node("CPCompare")}


def compare(server: Server, graph: Graph, **how: float) -> str:
    """The text that Compare shows."""
    outputs = server.client.run(comparing(graph), **how).outputs
    (shown,) = [one for one in outputs.values() if "cp_compare" in one]
    print(shown["text"][0])
    return str(shown["text"][0])


def verdicts(text: str) -> list[tuple[str, str]]:
    return [(match["node"], match["verdict"]) for match in map(LINE.match, text.splitlines()) if match]


def noisy(parallel: Parallel | None) -> Graph:
    return plain(replace(FLUX, sampler="dpmpp_2m_sde", scheduler="normal"), parallel)


def with_a_lora(parallel: Parallel | None) -> Graph:
    return with_loras(plain(FLUX, parallel), [("flux_dev.safetensors", 0.7)])


PICTURES = {
    "cfg": lambda parallel: plain(FLUX, parallel),
    "no cfg": lambda parallel: plain(replace(FLUX, cfg=1.0), parallel),
    "noise": noisy,
    "LoRA": with_a_lora,
    "scheduled LoRA": hooked,
    "Wan": lambda parallel: plain(WAN, parallel),
    "a mask": lambda parallel: plain(replace(FLUX, masked=1, latent_seed=3, denoise=0.7), parallel),
    "custom sampler": lambda parallel: custom(FLUX, parallel, GUIDERS["CFGGuider"], ALGORITHMS["SamplerER_SDE"], 0),
    "a pack's wrapper with state": code("wrapper"),
    "a pack's dice": code("dice"),
    "a pack's guider with state": with_the_guider("CPTestPackGuider"),
    "a pack's sampler": with_the_sampler("CPTestPackSampler"),
    "a guider that cannot be sent": with_the_guider("DualModelGuider", model_negative=link("model"), cfg=2.0),
    "the loop in ComfyUI": on_the_model("CPTestForeignWrapper", kind="outer_sample"),
    "CP Load Diffusion Model and KSampler": lambda parallel: on_the_loader(
        sampling_graph(FLUX, "KSampler"), FLUX, parallel
    ),
    "CP Model and KSampler": behind_cp_model(lambda parallel: plain(FLUX, parallel)),
    "CP Model and a LoRA behind it": behind_cp_model(lambda parallel: plain(FLUX, parallel), lora=True),
    "CP Model and a pack's guider": behind_cp_model(with_the_guider("CPTestPackGuider")),
}


@pytest.mark.parametrize("what", PICTURES)
def test_what_is_equal_is_said_to_be_equal_to_rounding(server: Server, what: str) -> None:
    text = compare(server, PICTURES[what](SPLIT))
    assert [verdict for _, verdict in verdicts(text)] == ["equal to rounding"], text
    assert "Up to 1.0e-05" in text


def test_a_unet_is_equal_to_rounding(server: Server) -> None:
    text = compare(server, code_on_a_unet(server, "attn2_patch")(SPLIT))
    assert [verdict for _, verdict in verdicts(text)] == ["equal to rounding"], text
    last = server.client.get("/cp/status")["runs"][-1]
    assert (last["comparing"], last["measuring"]) == (True, False)


@pytest.mark.parametrize("picture", [code("process"), behind_cp_model(code("process"))], ids=["CP Sampler", "CP Model"])
def test_a_patch_that_does_something_else_in_a_worker_is_not_equal(server: Server, picture: Picture) -> None:
    text = compare(server, picture(SPLIT))
    assert [verdict for _, verdict in verdicts(text)] == ["NOT equal"], text


def test_an_approximate_run_is_said_to_be_one_with_how_far_apart_it_is(server: Server) -> None:
    graph = plain(FLUX, SPLIT)
    graph["config"]["inputs"]["comm_dtype"] = "float8_e4m3fn"
    text = compare(server, graph)
    assert [verdict for _, verdict in verdicts(text)] == ["approximate"], text


def test_in_half_precision_the_bar_is_what_one_unit_in_the_last_place_does(server: Server) -> None:
    """A wrong patch is wrong by more."""
    graphs = on_the_model("ModelComputeDtype", dtype="bf16")(SPLIT), code("process")(SPLIT)
    graphs[1]["half"] = node("ModelComputeDtype", model=link("changed"), dtype="bf16")
    graphs[1]["sampler"]["inputs"]["model"] = link("half")
    right, wrong = (compare(server, graph) for graph in graphs)
    assert [verdict for _, verdict in verdicts(right)] == ["equal to rounding"], right
    assert [verdict for _, verdict in verdicts(wrong)] == ["NOT equal"], wrong
    assert "what one unit in the last place of bfloat16 in the noise makes" in wrong


def test_a_second_sampler_begins_with_what_the_first_ones_step_has_made(server: Server) -> None:
    graph = plain(FLUX, SPLIT)
    graph["larger"] = node("LatentUpscaleBy", samples=link("sampler"), upscale_method="bilinear", scale_by=1.5)
    graph["second"] = {**graph["sampler"], "inputs": {**graph["sampler"]["inputs"], "latent_image": link("larger"),
                                                      "denoise": 0.6}}  # fmt: skip
    since = server.client.now()
    assert verdicts(compare(server, graph)) == [
        ("CPSampler (sampler)", "equal to rounding"),
        ("CPSampler (second)", "equal to rounding"),
    ]
    ran = {
        event.data["display_node"]
        for event in server.client.events(since)
        if event.kind == "executing" and event.data["node"]
    }
    assert ran & {"sampler", "larger", "second", "save"} == set(), "the samplers themselves"


def test_a_sampler_that_uses_no_workers_is_not_compared(server: Server) -> None:
    graph = plain(FLUX, SPLIT)
    graph["native"] = node(
        "KSampler", **{name: value for name, value in graph["sampler"]["inputs"].items() if name != "cp_config"}
    )
    assert [name for name, _ in verdicts(compare(server, graph))] == ["CPSampler (sampler)"]


def test_a_workflow_without_a_cp_node_is_refused_in_one_sentence(server: Server) -> None:
    with pytest.raises(NodeError, match="no sampler of this workflow uses workers"):
        compare(server, plain(FLUX, None))


def test_a_run_after_it_gives_the_whole_picture_and_one_before_it_keeps_its_cache(server: Server) -> None:
    want = latent_of(server.client.run(plain(FLUX, None)))
    graph = plain(FLUX, SPLIT)
    compare(server, graph)
    assert apart(latent_of(server.client.run(graph)), want) <= 1e-4, "not its single step"
    compare(server, graph)
    assert server.client.get("/queue") == {"queue_running": [], "queue_pending": []}
    assert server.client.get("/cp/status")["state"] == "idle"


def test_one_that_is_cancelled_leaves_nothing_behind(server: Server) -> None:
    graph = plain(longer(replace(FLUX, sampler="heun"), steps=1), SPLIT)
    slow = node("CPTestPackCode", model=link("model"), kind="slow")
    graph["changed"], graph["sampler"]["inputs"]["model"] = slow, link("changed")
    since = server.client.now()
    prompt = server.client.queue(comparing(graph))
    server.client.wait(lambda event: event.kind == "cp.status" and event.data["state"] == "sampling", 60, since)
    server.client.interrupt(prompt)
    with pytest.raises(Interrupted):
        server.client.finish(prompt, since=since)
    assert server.client.get("/cp/status")["runs"][-1]["end"] == "cancelled"
    want = latent_of(server.client.run(plain(FLUX, None)))
    assert apart(latent_of(server.client.run(plain(FLUX, SPLIT))), want) <= 1e-4
    assert verdicts(compare(server, plain(FLUX, SPLIT))) == [("CPSampler (sampler)", "equal to rounding")]


def test_cp_plan_shows_it_above_the_plan(server: Server) -> None:
    graph = code("process")(SPLIT)
    sampler = graph["sampler"]["inputs"]
    sockets = {name: sampler[name] for name in ("model", "latent_image", "positive", "cp_config")}
    graph["plan"] = node("CPPlan", **sockets, cfg=2.0, compare=True)
    del graph["save"]
    since = server.log_size()
    for _ in range(2):  # pressed again
        (shown,) = [one for one in server.client.run(graph).outputs.values() if "cp_plan" in one]
    assert server.log(since).count("FLUX on 2 worker(s): sampled in") == 2
    lines = shown["text"][0].splitlines()
    assert lines[0].startswith("Compare: CPSampler (sampler): NOT equal.")
    assert any(line.startswith("Degrees: ring_degree 1 x ulysses_degree 2") for line in lines)
    (plan,) = shown["cp_plan"]
    assert plan["troubles"][0][1]["code"] == "compare.unequal"


def test_cp_plan_compares_samplers_that_have_its_own_configuration(server: Server) -> None:
    graph = plain(FLUX, SPLIT)
    sampler = graph["sampler"]["inputs"]
    sockets = {name: sampler[name] for name in ("model", "latent_image", "positive", "cp_config")}
    graph["plan"] = node("CPPlan", **sockets, cfg=2.0, compare=True)
    sampler["cp_config"] = ["plan", 1]
    del graph["save"]
    shown = [one["text"][0] for one in server.client.run(graph).outputs.values() if "cp_plan" in one]
    assert shown[-1].startswith("Compare: CPSampler (sampler): equal to rounding")


@pytest.mark.parametrize(("kind", "exit_code"), [("wrapper", 0), ("process", 1), (None, 1)])
def test_the_command_says_it_without_the_page(server: Server, tmp_path: Path, kind: str | None, exit_code: int) -> None:
    graph = code(kind)(SPLIT) if kind else plain(FLUX, None)
    file = tmp_path / "workflow.json"
    file.write_text(json.dumps(graph))
    command = [server.comfy.python, "-m", "parallel_runtime", "report", "--compare", file, "--devices", "cpu"]
    command += ["--comfyui", server.comfy.root, "--", "--base-directory", server.base, "--force-fp32"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=OUR_ROOT, capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    print(done.stdout, done.stderr)
    said = {"wrapper": "CPSampler (sampler): equal to rounding", "process": "CPSampler (sampler): NOT equal"}
    assert said.get(kind or "", "no sampler of this workflow uses workers") in done.stdout
    assert done.returncode == exit_code
    assert not [one for one in (server.base / "output").iterdir() if one.name == "report"]
