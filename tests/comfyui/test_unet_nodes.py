"""What ComfyUI's nodes put onto a UNet gives KSampler's latent however the UNet is divided: by rows at odd sizes, in a
ring and by heads, by prompts and by images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from .cases import DEGREES
from .client import Graph, NodeError
from .graphs import Parallel
from .latents import apart, latent_of
from .nodes import sweep
from .nodes_benches import benches, write_benches
from .nodes_graphs import Trial, node
from .server import Server

BAR = 2e-5  # of the latent's standard deviation
ODD = "2,4,17,23"
PLAIN = "ModelSamplingDiscrete"  # its defaults are those of the networks here
ON = {
    "FreeU": "unet", "FreeU_V2": "unet", "PerturbedAttentionGuidance": "unet", "SelfAttentionGuidance": "unet",
    "HyperTile": "unet", "TomePatchModel": "unet", "PatchModelAddDownscale": "unet", "HypernetworkLoader": "unet",
    "ConditioningSetMask": "unet", "ConditioningSetArea": "unet", "ConditioningSetAreaPercentage": "unet",
    "LoraLoaderModelOnly": "unet", "ControlNetApplyAdvanced": "unet", "GLIGENTextBoxApply": "unet_gligen",
    "InpaintModelConditioning": "unet_inpaint", "InstructPixToPixConditioning": "unet_pix2pix",
    "unCLIPConditioning": "unet_unclip", "CLIPTextEncodeSDXLRefiner": "unet_refiner",
    "SVD_img2vid_Conditioning": "unet_svd",
}  # fmt: skip
DIVISIONS = {
    "ring 2": DEGREES["ring_2"],
    "Ulysses 2": DEGREES["ulysses_2"],
    "ring 3": DEGREES["ring_3"],
    "2 x 2": DEGREES["ring_2_x_ulysses_2"],
    "prompts": Parallel(cfg_degree=2),
    "images": Parallel(cfg_degree=1, data_degree=2),
}


@pytest.fixture(scope="module")
def unets(shared_server: Server) -> Server:
    write_benches(shared_server, set(ON.values()))
    return shared_server


def trial(name: str, division: str = "ring 2") -> Trial:
    bench = benches()[ON.get(name, "unet")]
    return Trial(node=name, bench=replace(bench, latent=ODD, parallel=DIVISIONS[division]))


@pytest.mark.sweep(one_in=57)
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("name", ON)
def test_a_node_gives_ksamplers_latent(unets: Server, name: str, division: str) -> None:
    (row,) = sweep(unets.client, [trial(name, division)])
    assert row.outcome == "equal" or row.apart <= BAR, row


@pytest.mark.parametrize("name", ["GLIGENTextBoxApply", "HypernetworkLoader"])
@pytest.mark.sweep(one_in=2)
def test_a_file_beside_the_model_is_loaded_by_the_workers_and_does_there_what_it_does_natively(
    unets: Server, name: str
) -> None:
    with_it, without = (_native(unets, trial(each)) for each in (name, PLAIN))
    without["MODEL"] = with_it["MODEL"]
    for text in ("positive", "negative"):
        without["sampler"]["inputs"][text] = _plain_text(with_it, without, text)
    want, plain = (latent_of(unets.client.run(graph)) for graph in (with_it, without))
    assert apart(plain, want) > 1e-3, "it does something"
    for division in ("ring 2", "prompts", "images"):
        ours = trial(name, division).graph(unets.client.get("/object_info"), DIVISIONS[division])
        assert apart(latent_of(unets.client.run(ours)), want) <= BAR, division
    theirs = _native(unets, trial(name))  # the loop stays in ComfyUI, each evaluation goes to the workers
    theirs["config"] = node("CPParallelConfig", **vars(DIVISIONS["ring 2"]))
    file = theirs["MODEL"]["inputs"]["unet_name"]
    theirs["MODEL"] = node("CPLoadDiffusionModel", unet_name=file, cp_config=["config", 0])
    assert apart(latent_of(unets.client.run(theirs)), want) <= BAR


def _native(server: Server, of: Trial) -> Graph:
    return of.graph(server.client.get("/object_info"), None)


def _plain_text(with_it: Graph, without: Graph, name: str) -> list[object]:
    """The prompt that goes into the node which is tried, or else into the sampler."""
    links: Iterable[object] = with_it["tried"]["inputs"].values()
    texts = [link for link in links if isinstance(link, list) and str(link[0]).startswith("text")]
    link = texts[0] if texts and name == "positive" else with_it["sampler"]["inputs"][name]
    without[str(link[0])] = with_it[str(link[0])]
    return link


def test_a_video_gives_each_prompt_its_own_worker_and_keeps_its_frames_together(unets: Server) -> None:
    """Auto divides nothing by rows that prompts can divide, and data_degree does not part frames."""
    info, name = unets.client.get("/object_info"), "SVD_img2vid_Conditioning"
    want = latent_of(unets.client.run(trial(name).graph(info, None)))
    for parallel in (Parallel(devices="cpu,cpu"), DIVISIONS["prompts"], DIVISIONS["images"]):
        assert apart(latent_of(unets.client.run(trial(name).graph(info, parallel))), want) <= BAR
        degrees = unets.client.get("/cp/status")["degrees"]
        assert degrees["cfg_degree"] * degrees["data_degree"] == 2


def test_a_compiled_network_is_refused_rows_by_its_name(unets: Server) -> None:
    graph = trial("FreeU").graph(unets.client.get("/object_info"), DIVISIONS["ring 2"])
    model = graph["sampler"]["inputs"]["model"]
    graph["compiled"] = node("CPTestCompile", model=model, backend="aot_eager", fullgraph=False)
    graph["sampler"]["inputs"]["model"] = ["compiled", 0]
    with pytest.raises(NodeError, match=r"UNetModel with torch\.compile cannot be split by sequence"):
        unets.client.run(graph)
