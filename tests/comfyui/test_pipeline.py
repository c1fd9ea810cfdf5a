"""CP Sampler in the stages of a pipeline: each worker with its own blocks, of any format; parity is test_parity's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from .cases import DEGREES, job
from .client import Graph, Interrupted, NodeError
from .comfy import ComfyInstall
from .graphs import Job, Parallel, Sampler, longer, sampling_graph, with_loras
from .latents import apart, latent_of
from .server import Server
from .test_kin import on_the_loader
from .test_shared_pages import JOB, graph_of, mapped_bytes, write_large, write_lora

TWO, THREE = DEGREES["pipeline_2"], Parallel(pipeline_degree=3)
FOUR = [Parallel(pipeline_degree=2, cfg_degree=2), Parallel(pipeline_degree=2, ulysses_degree=2),
        Parallel(pipeline_degree=2, data_degree=2)]  # fmt: skip
EXACT, BAR = 1e-5, 1e-4  # of the latent's standard deviation: rows are evaluated one by one; where tokens are cut


@pytest.mark.sweep
@pytest.mark.parametrize("parallel", [THREE, *FOUR], ids=["3", "2 x cfg 2", "2 x ulysses 2", "2 x data 2"])
def test_together_with_others(server: Server, parallel: Parallel) -> None:
    asked = job("flux_dev", "odd_size_guided")
    want = latent_of(server.client.run(sampling_graph(asked, "KSampler")))
    got = latent_of(server.client.run(sampling_graph(asked, "CPSampler", parallel)))
    assert apart(got, want) <= BAR


def test_another_division_of_the_same_model_loads_nothing_anew_and_is_right(server: Server) -> None:
    """Blocks come back where they were, and another model's are shared out meanwhile."""
    for family, parallel in (("wan_t2v", TWO), ("flux_dev", TWO), ("wan_t2v", DEGREES["ulysses_2"])):
        asked = Job(family=family, cfg=2.0, size=(9, 14), prompt_tokens=(7, 12))
        want = latent_of(server.client.run(sampling_graph(asked, "KSampler")))
        assert apart(latent_of(server.client.run(sampling_graph(asked, "CPSampler", parallel))), want) <= BAR


@pytest.fixture(scope="module")
def files(comfy: ComfyInstall, shared_server: Server) -> None:
    """FLUX in each format, and a LoRA for it."""
    models = shared_server.base / "models"
    source = models / "diffusion_models" / "flux_dev.safetensors"
    script = Path(__file__).with_name("write_formats.py")
    subprocess.run([comfy.python, script, comfy.root, source, source.parent], check=True, capture_output=True)


def picture(sampler: Sampler, name: str, lora: float) -> Graph:
    job = Job(family="flux_dev", cfg=2.0, size=(9, 14), steps=2, prompt_tokens=(7, 12))
    graph = sampling_graph(job, sampler, TWO if sampler == "CPSampler" else None)
    graph["model"]["inputs"]["unet_name"] = f"flux_dev{name and '_'}{name}.safetensors"
    return with_loras(graph, [("flux_dev.safetensors", lora)] if lora else [])


@pytest.mark.usefixtures("files")
@pytest.mark.sweep(one_in=5)
@pytest.mark.parametrize("name", ["", "bf16", "scaled_fp8", "int8", "nvfp4"])
def test_any_format_with_a_lora_that_changes_between_runs(server: Server, name: str) -> None:
    for lora in (0.8, -0.4, 0.0):
        want = latent_of(server.client.run(picture("KSampler", name, lora)))
        got = latent_of(server.client.run(picture("CPSampler", name, lora)))
        assert apart(got, want) <= BAR, lora


def test_a_stage_holds_what_a_lora_changes_of_its_own_blocks_alone(server: Server) -> None:
    """In memory of its own, where the CPU's workers have weights that are no more what the file has."""
    path = write_large(server.base / "models" / "diffusion_models", torch.float32)
    write_lora(server.base / "models" / "loras" / "of_large.safetensors")
    grown = {}
    for name, parallel in (("whole", DEGREES["ulysses_2"]), ("stages", TWO)):
        server.client.free()
        server.client.run(sampling_graph(JOB, "CPSampler", parallel))
        before = {process.pid: mapped_bytes(process.pid, "Anonymous") for process in server.workers().values()}
        server.client.run(with_loras(graph_of(path.name, "CPSampler", parallel), [("of_large.safetensors", 0.7)]))
        after = {process.pid: mapped_bytes(process.pid, "Anonymous") for process in server.workers().values()}
        grown[name] = max(after[pid] - before[pid] for pid in after)
    print(f"private memory of a worker grew by { ({name: size >> 20 for name, size in grown.items()}) } MiB")
    assert 0.3 * grown["whole"] < grown["stages"] < 0.6 * grown["whole"]


def test_a_cancel_stops_all_stages_and_the_next_run_has_the_same_bits(server: Server) -> None:
    asked = Job(family="flux_dev", cfg=2.0)
    want = latent_of(server.client.run(sampling_graph(asked, "CPSampler", TWO)))
    workers, since = server.workers(), server.client.now()
    prompt = server.client.queue(sampling_graph(longer(asked, steps=2000), "CPSampler", TWO))
    server.client.wait_for_step(3, since=since)
    server.client.interrupt(prompt)
    with pytest.raises(Interrupted):
        server.client.finish(prompt, since=since, timeout=30)
    assert torch.equal(latent_of(server.client.run(sampling_graph(asked, "CPSampler", TWO))), want)
    assert server.workers() == workers


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.sweep(one_in=2)
def test_a_killed_stage_fails_its_run_at_once_and_the_next_run_works(server: Server, rank: int) -> None:
    asked = Job(family="flux_dev", cfg=2.0)
    want = latent_of(server.client.run(sampling_graph(asked, "CPSampler", TWO)))
    since = server.client.now()
    prompt = server.client.queue(sampling_graph(longer(asked, steps=2000), "CPSampler", TWO))
    server.client.wait_for_step(3, since=since)
    server.workers()[rank].kill()
    with pytest.raises(NodeError, match=r"(?is)CPSampler.*(rank|worker).*(SIGKILL|killed|signal|died|gone)"):
        server.client.finish(prompt, since=since, timeout=30)
    assert torch.equal(latent_of(server.client.run(sampling_graph(asked, "CPSampler", TWO))), want)


def test_a_native_sampler_gets_each_evaluation_from_the_last_stage(server: Server) -> None:
    asked = Job(family="flux_dev", cfg=2.0, size=(9, 14))
    want = latent_of(server.client.run(sampling_graph(asked, "KSampler")))
    native = on_the_loader(sampling_graph(asked, "KSampler"), asked, TWO)
    assert apart(latent_of(server.client.run(native)), want) <= EXACT
