"""ComfyUI's own workflows, made small by rules, give KSampler's latents on two workers. Some run always, all of those
that sample where CP_TEST_SWEEP=1, and so does `python -m tests.comfyui.stock --run`."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from .comfy import ComfyInstall
from .nodes_graphs import node
from .server import Server
from .stock import sampling_graphs, templates
from .stock_graphs import NoBrowser
from .stock_run import line, run_all
from .stock_small import NotSmall, small
from .stock_zoo import FILES, tiny_of

ALWAYS = (  # together they have every kind of node that makes a MODEL, a guider, a sampler or sigmas
    "3d_hunyuan3d-v2.1", "flux_fill_inpaint_example", "flux_schnell", "image_anima_lllite_depth_control_to_image",
    "image_chroma1_radiance_text_to_image", "image_chrono_edit_14B", "image_flux2_klein_9b_kv_image_edit",
    "image_hidream_o1", "image_hidream_o1_dev", "image_ideogram4_t2i", "image_lens_t2i", "image_omnigen2_t2i",
    "image_z_image_turbo_fun_union_controlnet", "sdxl_refiner_prompt_example", "sdxlturbo_example",
    "txt_to_image_to_video", "utility_void_video_inpainting", "video_bernini_r_image_editing",
    "video_causal_forcing_i2v", "video_ltx2_3_id_lora", "video_ltx2_5_flf2v", "video_ltx2_depth_to_video",
    "video_wan2_1_infinitetalk", "video_wan_animate2", "video_wan_dancer", "video_wan_vace_14B_t2v", "wan2.1_fun_inp",
)  # fmt: skip
OF_A_SAMPLER = {"MODEL", "GUIDER", "SAMPLER", "SIGMAS", "NOISE"}  # outputs of nodes that change how is sampled


def test_a_workflow_gives_the_latents_of_its_native_samplers(comfy: ComfyInstall, server: Server) -> None:
    _, workflows = templates(comfy)
    names = () if os.environ.get("CP_TEST_SWEEP") else [name for name in ALWAYS if name in workflows]
    try:
        graphs = sampling_graphs(comfy, names)
    except NoBrowser as missing:
        pytest.skip(f"NO BROWSER: {missing}")
    rows = run_all(server, graphs)
    wrong = [row for row in rows if row.outcome in ("different", "unclear", "failed")]
    wrong += [row for row in rows if row.name in ALWAYS and row.outcome != "equal"]
    assert not wrong, "\n" + "\n".join(map(line, wrong))


@pytest.fixture
def info(server: Server) -> Any:
    return server.client.get("/object_info")


def test_those_that_run_always_have_every_kind_of_node_of_a_sampler(comfy: ComfyInstall, info: Any) -> None:
    try:
        graphs = sampling_graphs(comfy)
    except NoBrowser as missing:
        pytest.skip(f"NO BROWSER: {missing}")
    kinds = {name: _kinds(graph, info, name) for name, graph in graphs.items()}
    assert set().union(*kinds.values()) == set().union(*(kinds[name] for name in ALWAYS if name in kinds))


def _kinds(graph: Any, info: Any, name: str) -> set[str]:
    try:
        made = {call["class_type"] for call in small(graph, info, name).graph.values()}
    except NotSmall:
        return set()
    return {kind for kind in made if not kind.startswith("CPTest") and OF_A_SAMPLER & {*map(str, info[kind]["output"])}}


def graph(**changes: Any) -> dict[str, dict[str, Any]]:
    """A picture, a switch behind its loader, and a node that no pack has."""
    return {
        "1": node("UNETLoader", unet_name="flux1-dev.safetensors", weight_dtype="default"),
        "2": node("DualCLIPLoader", clip_name1="a", clip_name2="b", type="flux"),
        "3": node("CLIPTextEncode", clip=["2", 0], text=["9", 0]),
        "4": node("EmptySD3LatentImage", width=["8", 0], height=1024, batch_size=1),
        "5": node("ComfySwitchNode", switch=True, on_true=["1", 0], on_false=["1", 0]),
        "6": node("KSampler", model=["5", 0], positive=["3", 0], negative=["3", 0], latent_image=["4", 0], seed=1,
                  steps=30, cfg=1.0, sampler_name="euler", scheduler="simple", denoise=1.0),
        "7": node("SaveImage", images=["10", 0]),
        "8": node("PrimitiveInt", value=1024),
        "9": node("SomebodysPromptWriter"),
        "10": node("VAEDecode", samples=["6", 0], vae=["11", 0]),
        "11": node("VAELoader", vae_name="ae.safetensors"),
    } | changes  # fmt: skip


def test_a_workflow_is_made_small_by_rules(info: Any) -> None:
    made = small(graph(), info, "one")
    kinds = {call["class_type"] for call in made.graph.values()}
    assert "SaveImage" not in kinds
    assert "VAEDecode" not in kinds  # nothing that a sampler is not fed by
    assert made.graph["6"]["inputs"]["steps"] == 4
    assert made.graph["4"]["inputs"] == {"width": 192, "height": 128, "batch_size": 1}
    assert made.graph["3"]["inputs"]["text"] == "a lighthouse in the rain"
    text = made.graph[made.graph["3"]["inputs"]["clip"][0]]
    assert json.loads(text["inputs"]["spec"])["dim"] == tiny_of("flux1-dev.safetensors").text["dim"]
    assert made.stood_for == {"SomebodysPromptWriter"}


def test_a_network_without_a_tiny_one_is_named(info: Any) -> None:
    loader = node("UNETLoader", unet_name="ace_step_v1_3.5b.safetensors", weight_dtype="default")
    with pytest.raises(NotSmall, match="fixes the width"):
        small(graph(**{"1": loader}), info, "one")


def test_every_name_in_the_table_is_a_tiny_network() -> None:
    for _, tiny in FILES:
        assert tiny_of_name(tiny)


def tiny_of_name(entry: str) -> bool:
    from ..zoo.unets import UNET_FILES
    from .conditioning import SAMPLED, WITHOUT_PLAN
    from .graphs import TEXTS

    kind, _, name = entry.rpartition(" ")
    networks = {"family": {*TEXTS, "z_image"}, "unet": UNET_FILES, "control": {"sd35"}, "": SAMPLED | WITHOUT_PLAN}
    return name in networks[kind]
