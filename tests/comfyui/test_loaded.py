"""Nodes on a MODEL of CP Load Diffusion Model, sampled by ComfyUI's own KSampler: in the workers, or refused."""

from __future__ import annotations

import pytest
import torch

from .cases import DEGREES
from .client import Graph, NodeError
from .graphs import Job, sampling_graph, with_hooks
from .latents import apart, latent_of
from .server import Server
from .test_kin import ALGORITHMS, custom, link, node, on_the_loader
from .test_model_patches import Node, with_nodes

BAR = 1e-4  # of the latent's standard deviation, float32
FLUX = Job(family="flux_dev", cfg=2.0, size=(9, 14), prompt_tokens=(7, 12))
WAN = Job(family="wan_t2v", cfg=2.0, size=(8, 12), prompt_tokens=(7, 12))
SHIFT = Node("ModelSamplingSD3", {"shift": 2.0})


def graph(job: Job, *nodes: Node, loaded: bool = True) -> Graph:
    graph = sampling_graph(job, "KSampler")
    return with_nodes(on_the_loader(graph, job, DEGREES["ring_2"]) if loaded else graph, nodes)


@pytest.mark.parametrize(
    ("job", "node"),
    [
        (WAN, SHIFT),
        (FLUX, Node("ModelSamplingFlux", {"max_shift": 1.5, "base_shift": 0.5, "width": 768, "height": 512})),
        (FLUX, Node("ModelSamplingAuraFlow", {"shift": 3.0})),
        (FLUX, Node("RescaleCFG", {"multiplier": 0.7})),
    ],
    ids=str,
)
def test_what_nodes_do_to_the_sampling_counts(server: Server, job: Job, node: Node) -> None:
    native, plain = (latent_of(server.client.run(graph(job, *nodes, loaded=False))) for nodes in ((node,), ()))
    ours = latent_of(server.client.run(graph(job, node)))
    print(f"APART {node} {apart(ours, native):.1e}, without: {apart(plain, native):.2f}")
    assert apart(ours, native) <= BAR
    assert apart(plain, native) > 100 * BAR, "the node does something"


def test_what_one_run_puts_on_the_model_is_gone_in_the_next(server: Server) -> None:
    before, _, after = (latent_of(server.client.run(graph(WAN, *nodes))) for nodes in ((), (SHIFT,), ()))
    assert torch.equal(before, after)


def test_a_compute_dtype_counts(server: Server) -> None:
    in_bf16 = Node("ModelComputeDtype", {"dtype": "bf16"})
    native, plain = (latent_of(server.client.run(graph(FLUX, *nodes, loaded=False))) for nodes in ((in_bf16,), ()))
    auto = graph(FLUX, in_bf16)
    auto["loader_config"]["inputs"]["dtype"] = "auto"
    ours = latent_of(server.client.run(auto))
    print(f"APART bf16 {apart(ours, native):.1e}, without: {apart(plain, native):.2f}")
    assert apart(ours, native) < 0.5 * apart(plain, native)


@pytest.mark.parametrize("nodes", [(), (Node("ModelComputeDtype", {"dtype": "bf16"}),)], ids=["model", "node"])
def test_a_config_may_ask_for_another_dtype_than_the_model_has(server: Server, nodes: tuple[Node, ...]) -> None:
    plain = latent_of(server.client.run(graph(WAN, loaded=False)))
    other = graph(WAN, *nodes)
    other["loader_config"]["inputs"]["dtype"] = "float32" if nodes else "bfloat16"
    got = apart(latent_of(server.client.run(other)), plain)
    assert got <= BAR if nodes else 1e-4 < got < 0.5


PATCHED = [
    Node("PerturbedAttentionGuidance", {"scale": 3.0}),
    Node("SkipLayerGuidanceDiT", {
        "double_layers": "0", "single_layers": "0", "scale": 3.0, "start_percent": 0.0, "end_percent": 1.0,
        "rescaling_scale": 0.0}),
    Node("ScaleROPE", {
        "scale_x": 1.5, "shift_x": 0.0, "scale_y": 1.0, "shift_y": 0.0, "scale_t": 1.0, "shift_t": 0.0}),
]  # fmt: skip


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("node", PATCHED, ids=str)
def test_comfyuis_own_code_inside_blocks_goes_along_with_each_evaluation(server: Server, node: Node) -> None:
    native = latent_of(server.client.run(graph(FLUX, node, loaded=False)))
    assert apart(latent_of(server.client.run(graph(FLUX, node))), native) <= BAR


REFUSED: list[tuple[str, Node]] = [
    ("with attn1_patch of TomePatchModel, attn1_output_patch of TomePatchModel cannot be split by sequence",
     Node("TomePatchModel", {"ratio": 0.3})),
    ("with attn1_patch of _leave_alone cannot be split by sequence", Node("CPTestAttentionPatch")),
    ("injection bypass_lora", Node("LoraLoaderBypassModelOnly", {
        "lora_name": "flux_dev.safetensors", "strength_model": 1.0})),
]  # fmt: skip


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize(("name", "refused"), REFUSED, ids=lambda value: str(value))
def test_what_changes_the_network_is_refused_by_name_with_the_way_out(server: Server, name: str, refused: Node) -> None:
    with pytest.raises(NodeError, match=f"{name}.*(remove it|set ring_degree to 0)"):
        server.client.run(graph(FLUX, refused))


def test_a_scheduled_lora_is_ksamplers(server: Server) -> None:
    latents = []
    for loaded in False, True:
        hooked = graph(FLUX, loaded=loaded)
        hooked["hook"] = node("CreateHookLora", lora_name="flux_dev.safetensors", strength_model=1.0, strength_clip=1.0)
        latents.append(latent_of(server.client.run(with_hooks(hooked, link("hook")))))
    assert apart(latents[1], latents[0]) <= BAR


def test_the_loop_is_in_the_workers_and_the_hosts_memory_has_no_weights(server: Server) -> None:
    """More than one job a run would be an evaluation each."""
    since = server.log_size()
    server.client.run(graph(FLUX))
    assert "FLUX on 2 worker(s): sampled in" in server.log(since)
    assert "runs in ComfyUI's process" not in server.log(since)


def test_what_cannot_be_sent_keeps_the_loop_in_comfyui_also_with_a_guider_of_a_cp_sampler(server: Server) -> None:
    """The workers then evaluate its network."""
    for sampler in "SamplerCustomAdvanced", "CPSamplerCustom":
        graphs = [
            custom(FLUX, DEGREES["ring_2"] if ours else None, node(
                "CPTestForeignGuider", model=link("changed"), positive=link("positive"), negative=link("negative"),
                kind="plain",
            ), ALGORITHMS["KSamplerSelect"], 0)
            for ours in (False, sampler == "CPSamplerCustom")
        ]  # fmt: skip
        for each in graphs:
            each["changed"] = node("CPTestForeignWrapper", model=link("model"), kind="state")
        on_the_loader(graphs[1], FLUX, DEGREES["ring_2"])
        want, since = latent_of(server.client.run(graphs[0])), server.log_size()
        assert apart(latent_of(server.client.run(graphs[1])), want) <= BAR
        assert server.log(since).count("runs in ComfyUI's process") == 1
