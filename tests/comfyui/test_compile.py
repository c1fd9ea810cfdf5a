"""torch.compile in the workers: asked for on MODEL or by CP Parallel Config, block by block, with patience."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from .cases import DEGREES
from .client import Graph
from .comfy import ComfyInstall
from .graphs import Job, Parallel, sampling_graph
from .latents import apart, latent_of
from .processes import marked_processes
from .server import Server, running_server

EXACT = 1e-5  # of the latent's standard deviation, float32
FLUX = Job(family="flux_dev", cfg=3.0, steps=3)
STALL_SECONDS = 4.0  # compiling takes longer than that; a step of the tiny model does not
MINUTES = 600.0


@pytest.fixture(scope="module")
def inductor_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(scope="module")
def impatient(comfy: ComfyInstall, inductor_cache: Path) -> Iterator[Server]:
    own = {"CP_STALL_SECONDS": str(STALL_SECONDS), "TORCHINDUCTOR_CACHE_DIR": str(inductor_cache)}
    with running_server(comfy, env=own) as server:
        yield server


def compiled(graph: Graph, kind: str, **inputs: object) -> Graph:
    graph["compiled"] = {"class_type": kind, "inputs": {"model": ["model", 0], **inputs}}
    graph["sampler"]["inputs"]["model"] = ["compiled", 0]
    return graph


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("degrees", ["ring_2", "ulysses_2"])
@pytest.mark.parametrize("family", ["flux_dev", "wan_t2v"])
def test_what_is_on_the_model_is_compiled_in_the_workers_without_a_break(
    server: Server, family: str, degrees: str
) -> None:
    job, parallel = replace(FLUX, family=family), DEGREES[degrees]
    eager = latent_of(server.client.run(sampling_graph(job, "CPSampler", parallel)))
    graph = sampling_graph(job, "CPSampler", parallel)
    asked = compiled(graph, "CPTestCompile", backend="aot_eager", fullgraph=True)
    assert apart(latent_of(server.client.run(asked, timeout=MINUTES)), eager) <= EXACT
    again = latent_of(server.client.run(sampling_graph(job, "CPSampler", parallel)))
    assert apart(again, eager) == 0.0, "the next run, without the node, is eager"


def test_a_native_sampler_compiles_nothing_in_comfyuis_process(server: Server) -> None:
    def native(*, asked: bool) -> Graph:
        graph = sampling_graph(FLUX, "KSampler")
        graph["config"] = {"class_type": "CPParallelConfig", "inputs": vars(DEGREES["ring_2"])}
        graph["model"] = {"class_type": "CPLoadDiffusionModel",
                          "inputs": {"unet_name": "flux_dev.safetensors", "cp_config": ["config", 0]}}  # fmt: skip
        return compiled(graph, "CPTestCompile", backend="aot_eager", fullgraph=True) if asked else graph

    eager = latent_of(server.client.run(native(asked=False)))
    assert apart(latent_of(server.client.run(native(asked=True), timeout=MINUTES)), eager) <= EXACT


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_workers_that_start_for_a_compiled_model_make_the_compiler_ready(server: Server) -> None:
    def compilers() -> list[str]:
        return [each.command for each in marked_processes(server.mark) if "compile_worker" in each.command]

    one = Parallel(devices="cpu")  # which has two cores or more, as a pool of processes needs
    server.client.run(sampling_graph(FLUX, "CPSampler", DEGREES["ring_2"]))
    graph = compiled(sampling_graph(FLUX, "CPSampler", one), "CPTestCompile", backend="aot_eager", fullgraph=True)
    server.client.run(graph, timeout=MINUTES)
    assert compilers(), "inductor's processes, which this backend does not start"


@pytest.mark.sweep  # minutes of a C++ compiler
def test_the_first_step_may_compile_for_longer_than_a_stall(impatient: Server, inductor_cache: Path) -> None:
    eager = latent_of(impatient.client.run(sampling_graph(FLUX, "CPSampler", DEGREES["ring_2"])))
    on: Parallel = replace(DEGREES["ring_2"], compile="on")
    first = impatient.client.run(sampling_graph(FLUX, "CPSampler", on), timeout=MINUTES)
    assert list(inductor_cache.glob("**/*.so")), "nothing was compiled"
    assert first.seconds > STALL_SECONDS
    assert apart(latent_of(first), eager) <= EXACT


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize("layers", ["diffusion_model.double_blocks.0", "diffusion_model"])
def test_layers_that_a_pack_has_compiled_by_object_patches_are_compiled_in_the_workers(
    impatient: Server, layers: str
) -> None:
    """Without the node the MODEL is sampled there, too, though ComfyUI has the compiled layers loaded."""
    parallel = DEGREES["ulysses_2"]
    native = compiled(sampling_graph(FLUX, "KSampler"), "CPTestCompile", backend="eager", layers=layers)
    want, since = latent_of(impatient.client.run(native, timeout=MINUTES)), impatient.log_size()
    plain = sampling_graph(FLUX, "CPSampler", parallel)
    assert apart(latent_of(impatient.client.run(plain, timeout=MINUTES)), want) <= EXACT
    asked = compiled(sampling_graph(FLUX, "CPSampler", parallel), "CPTestCompile", backend="eager", layers=layers)
    assert apart(latent_of(impatient.client.run(asked, timeout=MINUTES)), want) <= EXACT
    assert impatient.log(since).count("on 2 worker(s): sampled in") == 2


@pytest.mark.sweep
def test_comfyuis_own_node_does_the_same(impatient: Server) -> None:
    parallel = DEGREES["ulysses_2"]
    eager = latent_of(impatient.client.run(sampling_graph(FLUX, "CPSampler", parallel)))
    asked = compiled(sampling_graph(FLUX, "CPSampler", parallel), "TorchCompileModel", backend="inductor")
    assert apart(latent_of(impatient.client.run(asked, timeout=MINUTES)), eager) <= EXACT
