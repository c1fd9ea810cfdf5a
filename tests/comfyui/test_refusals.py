"""What a worker cannot honour is refused by name, before any worker is started."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from .cases import DEGREES
from .client import Graph, NodeError
from .graphs import Job, Parallel, sampling_graph, with_attention_patch, with_control_net
from .latents import apart, latent_of
from .server import Server
from .test_kin import GUIDERS, custom, link, node

RING_2 = DEGREES["ring_2"]
FLUX = Job(family="flux_dev", cfg=2.0)
WAN = Job(family="wan_t2v", cfg=2.0)
QWEN = Job(family="qwen_image", cfg=2.0)
EULER = node("KSamplerSelect", sampler_name="euler")
CFG = GUIDERS["CFGGuider"]
WAY_OUT = (
    "remove it, or sample|sample with|choose another|needs one from|load without|sample it with|use the text encoder"
)


@pytest.fixture(autouse=True)
def warm(server: Server) -> None:
    """Workers that live: none are started ahead of a refusal that takes its time, and one that fails is missed."""
    server.client.run(sampling_graph(FLUX, "CPSampler", RING_2))


@pytest.mark.parametrize(
    ("changed", "name"),
    [(with_attention_patch, "attn1_patch"), (with_control_net, "ControlNet")],
    ids=["attention_patch", "control_net"],
)
def test_what_changes_the_model_unseen_is_refused_by_name(
    server: Server, changed: Callable[[Graph], Graph], name: str
) -> None:
    before = server.children()
    with pytest.raises(NodeError, match=f"(?i){name}"):
        server.client.run(changed(sampling_graph(FLUX, "CPSampler", DEGREES["ring_2"])))
    assert server.children() == before


def on_the_model(kind: str, /, **widgets: object) -> Graph:
    graph = sampling_graph(FLUX, "CPSampler", RING_2)
    graph["changed"] = node(kind, model=link("model"), **widgets)
    graph["sampler"]["inputs"]["model"] = link("changed")
    return graph


def on_the_positive(kind: str, /, job: Job = FLUX, **widgets: object) -> Graph:
    graph = sampling_graph(job, "CPSampler", RING_2)
    graph["changed"] = node(kind, conditioning=link("positive"), **widgets)
    graph["sampler"]["inputs"]["positive"] = link("changed")
    return graph


def with_the_guider(kind: str, /, **widgets: object) -> Graph:
    inputs = {name: link(name) for name in ("model", "positive", "negative")}
    return custom(FLUX, RING_2, node(kind, **inputs, **widgets), EULER, 0)


def loaded_as(weight_dtype: str) -> Graph:
    graph = sampling_graph(FLUX, "CPSampler", RING_2)
    graph["model"]["inputs"]["weight_dtype"] = weight_dtype
    return graph


def two_streams() -> Graph:
    graph = sampling_graph(WAN, "CPSampler", RING_2)
    graph["audio"] = node("CPTestLatent", shape="1,8,4,16", seed=3, masked=False, nonce=1)
    graph["streams"] = node("LTXVConcatAVLatent", video_latent=link("latent"), audio_latent=link("audio"))
    graph["sampler"]["inputs"]["latent_image"] = link("streams")
    return graph


REFUSED: dict[str, tuple[str, Graph]] = {
    "GLIGEN": ("GLIGEN boxes", on_the_positive("CPTestOddCondition", kind="gligen")),
    "reference image": (
        r"reference images \(ref_latents\)", on_the_positive("ReferenceLatent", latent=link("latent"))),
    "torch.compile": ("torch.compile", on_the_model("TorchCompileModel", backend="inductor")),
    "reference cache": ("post_input.*nodes_flux", on_the_model("FluxKVCache")),
    "model function": ("a model function wrapper", on_the_model("CPTestForeignWrapper", kind="model_function")),
    "step cache of a pack": ("the diffusion_model wrapper cp_test_nodes.*_go_on",
                             on_the_model("CPTestForeignWrapper", kind="diffusion_model")),
    "option of a pack": ("the transformer option cp_test_attention",
                         on_the_model("CPTestForeignWrapper", kind="transformer_option")),
    "loader of a pack": ("does not say which file", on_the_model("CPTestForeignWrapper", kind="no_file")),
    "guider of a pack": ("the GUIDER cp_test_nodes.foreign.Halved",
                         with_the_guider("CPTestForeignGuider", kind="subclass")),
    "guidance on a guider": (r"model options of its own \(sampler_post_cfg_function\)",
                             with_the_guider("CPTestForeignGuider", kind="options")),
    "guider of two models": ("uncond_model_patcher",
                             with_the_guider("DualModelGuider", model_negative=link("model"), cfg=2.0)),
    "sampler of a pack": ("the SAMPLER cp_test_nodes.foreign._last_word",
                          custom(FLUX, RING_2, CFG, node("CPTestForeignSampler"), 0)),
    "sampler that goes block by block": ("the SAMPLER comfy.k_diffusion.sampling.sample_ar_video",
                                         custom(WAN, RING_2, CFG, node("SamplerARVideo", num_frame_per_block=1), 0)),
    "soft text mask": ("attention_mask is floating point",
                       on_the_positive("CPTestOddCondition", job=QWEN, kind="soft mask")),
    "text mask of another text": (r"attention_mask has the shape \(1, 3\), for a text of \d+ tokens",
                                  on_the_positive("CPTestOddCondition", job=QWEN, kind="short mask")),
    "fast fp8": ("fp8_optimizations", loaded_as("fp8_e4m3fn_fast")),
    "audio and video": ("several streams", two_streams()),
}  # fmt: skip


@pytest.mark.sweep(one_in=4)
@pytest.mark.parametrize("what", REFUSED)
def test_what_workers_cannot_have_is_refused_by_name_with_the_way_out(server: Server, what: str) -> None:
    """More of them: test_model_patches.py, test_lora.py and test_loaded.py."""
    before = server.children()
    name, graph = REFUSED[what]
    with pytest.raises(NodeError, match=rf"(?s)Refused: .*{name}.*({WAY_OUT})") as refusal:
        server.client.run(fresh(graph))
    print(refusal.value)
    assert server.children() == before


def fresh(graph: Graph) -> Graph:
    """ComfyUI does not run again what it has run."""
    return {**graph, "save": sampling_graph(FLUX, "KSampler")["save"]}


def test_more_ranks_than_devices_are_refused_before_a_process_starts(server: Server) -> None:
    before = server.children()
    nine = Parallel(ring_degree=3, ulysses_degree=3, devices="cuda:0")
    with pytest.raises(NodeError, match=r"cuda:0|GPU 0"):
        server.client.run(sampling_graph(FLUX, "CPSampler", nine))
    assert server.children() == before


@pytest.mark.parametrize("devices", ["cuda:banana", "tpu:0"])
def test_a_device_list_that_is_none_is_refused_with_the_value_found(server: Server, devices: str) -> None:
    before = server.children()
    with pytest.raises(NodeError, match=devices):
        server.client.run(sampling_graph(FLUX, "CPSampler", Parallel(devices=devices)))
    assert server.children() == before


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ("1,8,16,24", "16 channels"),
        ("16,16,24", "shape .16, 16, 24."),
        ("1,16,2,8,8", "wants .batch"),
        ("1,16,0,8", "empty"),
    ],
)
def test_a_latent_that_the_model_cannot_take_is_refused_with_its_shape(server: Server, shape: str, says: str) -> None:
    graph = sampling_graph(FLUX, "CPSampler", DEGREES["ring_2"])
    graph["latent"]["inputs"] |= {"shape": shape, "seed": 3}
    with pytest.raises(NodeError, match=f"the LATENT has the shape.*{says}|{says}"):
        server.client.run(graph)


def test_conditioning_of_another_model_is_refused_with_both_widths(server: Server) -> None:
    graph = sampling_graph(FLUX, "CPSampler", DEGREES["ring_2"])
    graph["negative"]["inputs"]["spec"] = '{"tokens": 5, "dim": 96, "pooled": 64}'
    with pytest.raises(NodeError, match="negative: the CONDITIONING is 96 wide, a flux model wants 128"):
        server.client.run(graph)


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize("consumer", ["CPSampler", "CPPlan"])
@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ('{"tokens": 5, "dim": 96, "pooled": 64}', "positive: the CONDITIONING is 96 wide, a flux model wants 128"),
        ('{"tokens": 5, "dim": 128, "pooled": 63}', "positive: the pooled text of the CONDITIONING is 63 wide"),
        ('{"tokens": 0, "dim": 128, "pooled": 64}', "positive: the CONDITIONING has no tokens"),
    ],
    ids=["width", "pooled width", "no tokens"],
)
def test_the_plan_and_the_sampler_refuse_the_same_conditioning(
    server: Server, consumer: str, spec: str, says: str
) -> None:
    graph = sampling_graph(FLUX, "CPSampler", DEGREES["ring_2"])
    graph["positive"]["inputs"]["spec"] = spec
    if consumer == "CPPlan":
        graph["plan"] = node(
            "CPPlan", model=link("model"), latent_image=link("latent"), positive=link("positive"), cfg=2.0
        )
        graph = {name: graph[name] for name in ("model", "positive", "latent", "plan")}
    with pytest.raises(NodeError, match=f"{consumer}: .*Refused: {says}"):
        server.client.run(graph)


def test_a_prompt_without_tokens_is_sampled_where_comfyui_can(server: Server) -> None:
    native, ours = sampling_graph(WAN, "KSampler"), sampling_graph(WAN, "CPSampler", DEGREES["ring_2"])
    for graph in (native, ours):
        graph["positive"]["inputs"]["spec"] = '{"tokens": 0, "dim": 4096}'
    assert apart(*(latent_of(server.client.run(graph)) for graph in (ours, native))) <= 1e-4


def test_a_file_that_changed_under_a_loaded_model_is_refused_and_not_sampled_with(server: Server) -> None:
    job = Job(family="flux_schnell")
    server.client.run(sampling_graph(job, "CPSampler", DEGREES["ring_2"]))
    file = server.base / "models" / "diffusion_models" / "flux_schnell.safetensors"
    before = file.stat()
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    try:
        with pytest.raises(NodeError, match="changed on disk after this MODEL was loaded"):
            server.client.run(sampling_graph(job, "CPSampler", DEGREES["ring_2"]))
    finally:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    server.client.run(sampling_graph(job, "CPSampler", DEGREES["ring_2"]))
