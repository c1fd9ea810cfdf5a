"""What ComfyUI's own nodes put on a MODEL: it runs in the workers as it is."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from .cases import ALONE, DEGREES
from .client import Graph
from .comfy import OUR_ROOT, ComfyInstall
from .graphs import TEXTS, Job, Parallel, sampling_graph
from .latents import apart, latent_of
from .server import Server

BAR = 1e-4  # of the latent's standard deviation, float32
RING_2 = DEGREES["ring_2"]
FLUX = Job(family="flux_dev", cfg=3.0)
QWEN = Job(family="qwen_image", cfg=3.0, steps=8)
WAN = Job(family="wan_t2v", cfg=3.0)
INPAINTING = replace(FLUX, latent_seed=3, steps=8)
LONG = replace(FLUX, steps=16)


@dataclass(frozen=True)
class Node:
    """A node between the model and the sampler; `also` are further nodes that it reads."""

    kind: str
    inputs: dict[str, Any] = field(default_factory=dict)
    also: Graph = field(default_factory=dict)

    def __str__(self) -> str:
        return "_".join([self.kind, *(str(value) for value in self.inputs.values() if not isinstance(value, list))])


SHARPEN = {
    "operation": {"class_type": "LatentOperationSharpen", "inputs": {"sharpen_radius": 3, "sigma": 1.0, "alpha": 0.2}}
}
EMPTY = {
    "empty": {"class_type": "CPTestConditioning", "inputs": {"spec": json.dumps({"tokens": 5, **TEXTS["flux_dev"]}),
                                                             "seed": 4004}}
}  # fmt: skip
MASK = {
    "whole": {"class_type": "SolidMask", "inputs": {"value": 1.0, "width": 192, "height": 128}},
    "ramp": {"class_type": "FeatherMask", "inputs": {"mask": ["whole", 0], "left": 150, "top": 0, "right": 0,
                                                     "bottom": 60}},
    "masked": {"class_type": "SetLatentNoiseMask", "inputs": {"samples": ["latent", 0], "mask": ["ramp", 0]}},
}  # fmt: skip
HONOURED: list[tuple[Job, tuple[Node, ...]]] = [
    (FLUX, (Node("ModelSamplingFlux", {"max_shift": 1.15, "base_shift": 0.5, "width": 768, "height": 512}),)),
    (FLUX, (Node("ModelSamplingSD3", {"shift": 4.0}),)),
    (QWEN, (Node("ModelSamplingAuraFlow", {"shift": 3.1}),)),
    (WAN, (Node("ModelSamplingSD3", {"shift": 3.0}),)),
    (WAN, (Node("ModelSamplingLTXV", {"max_shift": 2.05, "base_shift": 0.95}),)),
    (FLUX, (Node("RescaleCFG", {"multiplier": 0.7}),)),
    (WAN, (Node("RescaleCFG", {"multiplier": 0.4}),)),
    (QWEN, (Node("CFGNorm", {"strength": 0.9, "pre_cfg": False}),)),
    (QWEN, (Node("CFGNorm", {"strength": 0.8, "pre_cfg": True}),)),
    (WAN, (Node("CFGZeroStar"),)),
    (FLUX, (Node("ModelSamplingAuraFlow", {"shift": 2.0}), Node("CFGZeroStar"), Node("CFGNorm", {"strength": 1.0}))),
    (FLUX, (Node("APG", {"eta": 0.5, "norm_threshold": 5.0, "momentum": -0.5}),)),
    (FLUX, (Node("TCFG"),)),
    (FLUX, (Node("FreSca", {"scale_low": 1.0, "scale_high": 1.5, "freq_cutoff": 4}),)),
    (FLUX, (Node("Mahiro"),)),
    (FLUX, (Node("Epsilon Scaling", {"scaling_factor": 1.01}),)),
    (FLUX, (Node("TemporalScoreRescaling", {"tsr_k": 0.9, "tsr_sigma": 1.0}),)),
    (FLUX, (Node("CFGOverride", {"cfg": 1.5, "start_percent": 0.3, "end_percent": 0.8}),)),
    (FLUX, (Node("PerpNeg", {"empty_conditioning": ["empty", 0], "neg_scale": 0.7}, EMPTY),)),
    (FLUX, (Node("LatentApplyOperationCFG", {"operation": ["operation", 0]}, SHARPEN),)),
]


def name_of(value: Job | tuple[Node, ...]) -> str:
    return value.family if isinstance(value, Job) else "+".join(map(str, value))


@pytest.mark.sweep(one_in=7)
@pytest.mark.parametrize(("job", "nodes"), HONOURED, ids=name_of)
def test_sampling_maths_on_the_model_gives_ksamplers_latent(server: Server, job: Job, nodes: tuple[Node, ...]) -> None:
    check(server, job, nodes, RING_2)


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("strength", [1.0, 0.5])
def test_differential_diffusion_follows_the_greys_of_the_mask(server: Server, strength: float) -> None:
    latents = []
    for sampler, parallel, nodes in (
        ("KSampler", None, (Node("DifferentialDiffusion", {"strength": strength}),)),
        ("CPSampler", RING_2, (Node("DifferentialDiffusion", {"strength": strength}),)),
        ("KSampler", None, ()),
    ):
        graph = with_nodes(sampling_graph(INPAINTING, sampler, parallel), nodes) | MASK
        graph["sampler"]["inputs"]["latent_image"] = ["masked", 0]
        latents.append(latent_of(server.client.run(graph)))
    native, ours, plain = latents
    print(f"APART DifferentialDiffusion {strength} {apart(ours, native):.1e}, without: {apart(plain, native):.2f}")
    assert apart(ours, native) <= BAR
    assert apart(plain, native) > 100 * BAR


@pytest.mark.sweep(one_in=11)
@pytest.mark.parametrize("job", [LONG, replace(WAN, steps=16)], ids=["flux_dev", "wan_t2v"])
@pytest.mark.parametrize("kind", ["EasyCache", "LazyCache"])
@pytest.mark.parametrize("degrees", [ALONE, "ring_2", "ulysses_2"])
def test_a_step_cache_skips_the_steps_that_it_skips_in_comfyui(
    server: Server, job: Job, kind: str, degrees: str
) -> None:
    check(server, job, (step_cache(kind),), DEGREES[degrees])


@pytest.mark.parametrize(("kind", "shared"), [("EasyCache", False), ("LazyCache", True)])
def test_prompts_are_shared_out_unless_the_cache_looks_at_both(server: Server, kind: str, shared: bool) -> None:
    """EasyCache is around the network and decides by all prompts: workers that had one each would do both."""
    nodes = (step_cache(kind),)
    want = latent_of(server.client.run(with_nodes(sampling_graph(LONG, "KSampler"), nodes)))
    graph = with_nodes(sampling_graph(LONG, "CPSampler", Parallel(devices="cpu,cpu")), nodes)
    assert apart(latent_of(server.client.run(graph)), want) <= BAR
    degrees = server.client.get("/cp/status")["degrees"]
    assert (degrees["cfg_degree"], degrees["ring_degree"] * degrees["ulysses_degree"]) == ((2, 1) if shared else (1, 2))


def test_all_stages_of_a_pipeline_skip_the_same_steps(server: Server) -> None:
    """EasyCache decides by the network's answer, which the last stage has first."""
    check(server, LONG, (step_cache("EasyCache"),), DEGREES["pipeline_2"])


def test_what_lies_on_the_model_is_as_fresh_in_every_run(server: Server) -> None:
    """Caches and running averages of one run are not seen by the next."""
    nodes = (step_cache("EasyCache"), Node("APG", {"eta": 0.5, "norm_threshold": 5.0, "momentum": -0.5}))
    first, second = (sample(server, LONG, nodes, RING_2) for _ in range(2))
    assert torch.equal(first, second)
    plain = sample(server, LONG, (), RING_2)
    want = latent_of(server.client.run(sampling_graph(LONG, "KSampler")))
    assert apart(plain, want) <= BAR


@pytest.mark.sweep(one_in=5)
@pytest.mark.parametrize("name", ["os:system", "comfy.utils:os.system", "comfy.utils:torch.load", "comfyx.a:b"])
def test_a_worker_makes_nothing_that_is_not_comfyuis(comfy: ComfyInstall, name: str) -> None:
    code = (
        f"import sys; sys.path += ['.', {str(comfy.root)!r}]; sys.argv = ['main.py', '--cpu']\n"
        "import comfy.options; comfy.options.enable_args_parsing()\n"
        "from parallel_runtime.loading.object_codec import Rebuilder\n"
        f"Rebuilder({{}})({{'kind': 'name', 'name': {name!r}}})"
    )
    done = subprocess.run([comfy.python, "-c", code], cwd=OUR_ROOT, capture_output=True, text=True)
    assert f"Refused: {name} is not part of ComfyUI" in done.stderr


def check(server: Server, job: Job, nodes: tuple[Node, ...], parallel: Parallel) -> None:
    want = latent_of(server.client.run(with_nodes(sampling_graph(job, "KSampler"), nodes)))
    plain = latent_of(server.client.run(sampling_graph(job, "KSampler")))
    got = sample(server, job, nodes, parallel)
    print(f"APART {job.family} {'+'.join(map(str, nodes))} {apart(got, want):.1e}, without: {apart(plain, want):.2f}")
    assert apart(got, want) <= BAR
    assert apart(plain, want) > 100 * BAR, "the node does something"


def sample(server: Server, job: Job, nodes: tuple[Node, ...], parallel: Parallel) -> torch.Tensor:
    return latent_of(server.client.run(with_nodes(sampling_graph(job, "CPSampler", parallel), nodes)))


def test_pytorchs_attention_by_comfyuis_node_is_honoured_also_in_a_ring(server: Server) -> None:
    nodes = (Node("ModelAttentionBackend", {"attention": "pytorch attention"}),)
    want = latent_of(server.client.run(with_nodes(sampling_graph(FLUX, "KSampler"), nodes)))
    for workers in (Parallel(devices="cpu,cpu", cfg_degree=1), RING_2):
        got = server.client.run(with_nodes(sampling_graph(FLUX, "CPSampler", workers), nodes))
        assert apart(latent_of(got), want) <= BAR


def with_nodes(graph: Graph, nodes: tuple[Node, ...]) -> Graph:
    for index, node in enumerate(nodes):
        graph |= node.also
        inputs = {"model": graph["sampler"]["inputs"]["model"], **node.inputs}
        graph[f"patch_{index}"] = {"class_type": node.kind, "inputs": inputs}
        graph["sampler"]["inputs"]["model"] = [f"patch_{index}", 0]
    return graph


def step_cache(kind: str) -> Node:
    return Node(kind, {"reuse_threshold": 0.4, "start_percent": 0.1, "end_percent": 0.95, "verbose": False})
