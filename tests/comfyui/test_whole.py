"""What needs all tokens inside of blocks, or keeps what blocks made: the network runs whole, and is named with it. What
needs all tokens of a frame has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from .cases import DEGREES
from .client import Graph, NodeError
from .conditioning import picture
from .graphs import Parallel
from .latents import apart, latent_of
from .server import Server
from .test_kin import link, node
from .test_patch_models import vae

TWO_WORKERS = Parallel(devices="cpu,cpu")
SIDES = {"width": 112, "height": 80}
TALK = {
    "mode": "single_speaker", "model": link("model"), "model_patch": link("patch"), "vae": link("vae"), **SIDES,
    "positive": link("positive"), "negative": link("negative"), "length": 9, "motion_frame_count": 5,
    "audio_scale": 1.0, "audio_encoder_output_1": link("heard"), "start_image": link("start"),
}  # fmt: skip
TALKING = {
    **vae("wan.safetensors"),
    "patch": node("ModelPatchLoader", name="infinite_talk.safetensors"),
    "heard": node("CPTestHeard", steps=40, seed=8),
    "start": node("CPTestPictures", shape="1,80,112,3", seed=6, nonce=0),
}


@dataclass(frozen=True, kw_only=True)
class Scene:
    """`nodes` beside those of a network's picture, `inputs` of its sampler instead of what they were."""

    network: str
    nodes: Graph
    named: str = ""
    shape: str = "1,16,3,10,14"
    inputs: dict[str, Any] = field(default_factory=dict)

    def graph(self, parallel: Parallel | None) -> Graph:
        graph = self.plain(parallel)
        graph["sampler"]["inputs"] |= self.inputs
        graph |= self.nodes
        return in_blocks_of_frames(graph) if "algorithm" in graph else graph

    def plain(self, parallel: Parallel | None = None) -> Graph:
        graph = picture(self.network, parallel)
        graph["latent"]["inputs"]["shape"] = self.shape
        graph["sampler"]["inputs"]["cfg"] = 1.0
        return graph


def in_blocks_of_frames(graph: Graph) -> Graph:
    """With a SAMPLER and SIGMAS in place of their names."""
    sampler = graph["sampler"]
    kept = ("model", "positive", "negative", "cfg", "latent_image", "cp_config")
    given = {name: value for name, value in sampler["inputs"].items() if name in kept}
    graph["sigmas"] = node("BasicScheduler", model=given["model"], scheduler="beta", steps=3, denoise=1.0)
    graph["sampler"] = node(
        {"KSampler": "SamplerCustom", "CPSampler": "CPSamplerCustomBasic"}[sampler["class_type"]],
        sampler=link("algorithm"), sigmas=link("sigmas"), add_noise=True, noise_seed=7, **given,
    )  # fmt: skip
    return graph


def causal(frames: int, **more: Any) -> Graph:
    return {"algorithm": node("SamplerARVideo", num_frame_per_block=frames), **more}


SCENES = {
    "causal Wan, frame by frame": Scene(
        network="causal_wan", nodes=causal(1), named="CausalWanModel with sample_ar_video"
    ),
    "causal Wan, two at once, from a picture": Scene(
        network="causal_wan", named="CausalWanModel with sample_ar_video",
        nodes=causal(
            2, **vae("wan.safetensors"), start=TALKING["start"],
            first=node("ARVideoI2V", model=link("model"), vae=link("vae"), start_image=link("start"), **SIDES,
                       length=9, batch_size=1),
        ),
        inputs={"model": link("first"), "latent_image": link("first", 1)},
    ),
    "FLUX KV Cache": Scene(
        network="flux2_klein", shape="1,128,9,13", named="Flux with attn1_patch of KV_Attn_Input",
        nodes={"cached": node("FluxKVCache", model=link("model"))}, inputs={"model": link("cached")},
    ),
    "InfiniteTalk, two speakers": Scene(
        network="wan_talking", named="WanModel with attn1_patch of MultiTalkGetAttnMapPatch",
        nodes={
            **TALKING, "other": node("CPTestHeard", steps=40, seed=9), "nothing": node("SolidMask", value=0.0, **SIDES),
            "half": node("SolidMask", value=1.0, width=56, height=80),
            "mask": node("MaskComposite", destination=link("nothing"), source=link("half"), x=0, y=0, operation="add"),
            "other_mask": node(
                "MaskComposite", destination=link("nothing"), source=link("half"), x=56, y=0, operation="add"
            ),
            "talk": node("WanInfiniteTalkToVideo", **TALK | {
                "mode": "two_speakers", "mode.audio_encoder_output_2": link("other"), "mode.mask_1": link("mask"),
                "mode.mask_2": link("other_mask")}),
        },
        inputs={"model": link("talk"), "latent_image": link("talk", 3)},
    ),
}  # fmt: skip
INFINITE_TALK = Scene(
    network="wan_talking",
    nodes={**TALKING, "talk": node("WanInfiniteTalkToVideo", **TALK)},
    inputs={"model": link("talk"), "latent_image": link("talk", 3)},
)


@pytest.fixture(scope="module")
def server_of_whole(shared_server: Server, native_network: Callable[[str], Tensor]) -> Server:
    shared_server.write_tiny()
    return shared_server


@pytest.mark.parametrize("what", SCENES)
@pytest.mark.sweep(one_in=2)
def test_it_is_sampled_as_by_the_native_sampler_and_refused_by_name_where_it_shall_be_cut(
    server_of_whole: Server, vaes: Server, what: str
) -> None:
    scene = SCENES[what]
    want = latent_of(vaes.client.run(scene.graph(None)))
    assert apart(latent_of(vaes.client.run(scene.plain())), want) > 1e-3, "it does something"
    assert apart(latent_of(vaes.client.run(scene.graph(TWO_WORKERS))), want) <= 1e-5
    with pytest.raises(NodeError, match=rf"{scene.named} cannot be split by sequence; set ring_degree to 0"):
        vaes.client.run(scene.graph(DEGREES["ring_2"]))


@pytest.mark.parametrize("degrees", ["ring_2", "ulysses_2"])
@pytest.mark.sweep(one_in=2)
def test_a_voice_is_heard_by_the_frames_that_a_worker_has_a_part_of(
    server_of_whole: Server, vaes: Server, degrees: str
) -> None:
    """Of three frames the second is cut in its middle."""
    want = latent_of(vaes.client.run(INFINITE_TALK.graph(None)))
    assert apart(latent_of(vaes.client.run(INFINITE_TALK.plain())), want) > 1e-3, "it does something"
    assert apart(latent_of(vaes.client.run(INFINITE_TALK.graph(DEGREES[degrees]))), want) <= 1e-5
