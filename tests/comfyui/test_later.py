"""Networks and nodes of ComfyUIs after v0.33, imitated: what our nodes ask of them and say of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from parallel_runtime.commands.migrate import migrated

from ..engine.conftest import Group, Ranks
from .cases import DEGREES
from .client import Graph, NodeError
from .comfy import ComfyInstall
from .graphs import Job, Parallel, Sampler, sampling_graph
from .latents import apart, latent_of
from .server import Server
from .test_foreign import on_the_model

SCENES = "tests.comfyui.later_scenes"
FLUX = Job(family="flux_dev", cfg=2.0, steps=2, denoise=0.6)


@pytest.fixture(scope="module")
def process(comfy: ComfyInstall) -> Iterator[Group]:
    """One process of ComfyUI's python."""
    ranks = Ranks(comfy.python, [SCENES], {"COMFYUI_PATH": str(comfy.root)})
    yield Group(ranks, 1)
    ranks.close()


def test_workers_compute_the_methods_that_code_outside_of_forward_calls(process: Group) -> None:
    (asked,) = process.run(f"{SCENES}:outer_methods")
    assert [method for method, *_ in asked] == ["preprocess_prefix", "forward"]
    assert asked[0][1:] == ["text_input_ids"]


def test_an_evaluation_by_workers_is_no_part_of_recorded_allocations(process: Group) -> None:
    (seen,) = process.run(f"{SCENES}:malloc_graph")
    assert seen == ["paused", "evaluated", "recording", "evaluated"]


def test_keys_that_another_run_has_kept_are_gone_as_a_run_begins(process: Group) -> None:
    assert process.run(f"{SCENES}:kept_keys_of_another_run") == [[None, True]]


@pytest.mark.parametrize("of_blocks", [False, True], ids=["any network", "MiniMax H3's blocks"])
def test_block_sparse_attention_is_made_again_in_workers_and_leaves_the_network_divided(
    process: Group, of_blocks: bool
) -> None:
    (found,) = process.run(f"{SCENES}:sparse_options", of_blocks=of_blocks, previous="")
    assert found.pop("no ring").endswith("make_attention_override.<locals>.override")
    assert found == {"each head": True, "same": True, "sparse": True, "anew": True, "undivided": False}


def test_block_sparse_attention_over_a_foreign_one_says_nothing_of_heads(process: Group) -> None:
    (found,) = process.run(f"{SCENES}:sparse_options", of_blocks=False, previous="foreign")
    assert found == {"each head": False}


def test_minimax_h3s_fun_control_net_is_made_again_in_workers_with_its_vae(process: Group) -> None:
    (found,) = process.run(f"{SCENES}:fun_control_options")
    assert found.pop("vae") == "RankVAE"
    assert all(found.values()), found


def test_planning_knows_the_networks_and_which_of_them_has_no_ring(process: Group) -> None:
    (found,) = process.run(f"{SCENES}:figures")
    assert found == {
        "qwen": [3, 3, 96, "attn_fn of Qwen-Image 2.1"],
        "sensenova": [3, 3, 96, ""],
        "ming": [6, 4, 288, ""],
    }


def in_a_loop(graph: Graph) -> Graph:
    graph["loop"] = {"class_type": "CPTestLoop", "inputs": {"body": "sampler", "times": 2}}
    graph["save"]["inputs"]["samples"] = ["loop", 0]
    return graph


def looped(sampler: Sampler, parallel: Parallel | None = None) -> Graph:
    return in_a_loop(sampling_graph(FLUX, sampler, parallel))


def test_a_sampler_in_a_loop_of_the_graph_runs_on_the_workers_each_time(server: Server) -> None:
    native = latent_of(server.client.run(looped("KSampler")))
    once = latent_of(server.client.run(sampling_graph(FLUX, "KSampler")))
    workflow, changes = migrated(looped("KSampler"))
    assert [str(change) for change in changes] == ["node sampler: KSampler -> CPSampler"]
    assert workflow["loop"] == looped("KSampler")["loop"]
    before = server.client.get("/cp/status")["runs"]
    ours = latent_of(server.client.run(looped("CPSampler", DEGREES["ring_2"])))
    assert apart(ours, native) <= 1e-4
    assert apart(once, native) > 1e-2, "the second time changes something"
    runs = [run for run in server.client.get("/cp/status")["runs"] if run not in before]
    assert [(run["end"], run["workers"], run["steps"]) for run in runs[-2:]] == [("idle", 2, 2)] * 2


def test_a_refusal_inside_of_a_loop_is_said_of_the_node_on_the_canvas(server: Server) -> None:
    since, picture = server.client.now(), on_the_model("CPTestForeignWrapper", job=FLUX, kind="unheard_of_patch")
    with pytest.raises(NodeError, match="would run inside blocks"):
        server.client.run(in_a_loop(picture(DEGREES["ring_2"])))
    (refused,) = [event for event in server.client.events(since) if event.kind == "cp.refused"]
    assert refused.data["node_id"] == "sampler"
