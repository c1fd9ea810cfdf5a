"""CP Sampler in the stages of a pipeline: each worker with its own blocks, of any format; parity is test_parity's."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from .cases import DEGREES, job
from .client import Graph, Interrupted, NodeError
from .graphs import Job, Parallel, Sampler, longer, sampling_graph, with_control_net, with_loras
from .latents import apart, latent_of
from .server import Server
from .test_kin import on_the_loader
from .test_model_patches import Node, step_cache, with_nodes
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


def picture(sampler: Sampler, name: str, lora: float) -> Graph:
    job = Job(family="flux_dev", cfg=2.0, size=(9, 14), steps=2, prompt_tokens=(7, 12))
    graph = sampling_graph(job, sampler, TWO if sampler == "CPSampler" else None)
    graph["model"]["inputs"]["unet_name"] = f"flux_dev{name and '_'}{name}.safetensors"
    return with_loras(graph, [("flux_dev.safetensors", lora)] if lora else [])


@pytest.mark.usefixtures("formats")
@pytest.mark.sweep(one_in=5)
@pytest.mark.parametrize("name", ["", "bf16", "scaled_fp8", "int8", "nvfp4"])
def test_any_format_with_a_lora_that_changes_between_runs(server: Server, name: str) -> None:
    for lora in (0.8, -0.4, 0.0):
        want = latent_of(server.client.run(picture("KSampler", name, lora)))
        got = latent_of(server.client.run(picture("CPSampler", name, lora)))
        assert apart(got, want) <= BAR, lora


@pytest.mark.sweep
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
@pytest.mark.sweep  # test_crashes kills a rank in a ring
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


PATCHED = replace(TWO, patches=2)
EIGHT = Job(family="flux_dev", cfg=2.0, size=(9, 14), steps=8, prompt_tokens=(7, 12))


def test_patches_sample_nearly_the_same_picture_and_the_log_says_that_it_is_another(server: Server) -> None:
    want = latent_of(server.client.run(sampling_graph(EIGHT, "KSampler")))
    got = latent_of(server.client.run(sampling_graph(EIGHT, "CPSampler", PATCHED)))
    assert BAR < apart(got, want) < 0.2, "approximate"
    assert "approximate: not the picture of one GPU" in server.log()
    again = latent_of(server.client.run(sampling_graph(EIGHT, "CPSampler", PATCHED)))
    assert torch.equal(again, got), "a run has no keys of the one before"
    exact = latent_of(server.client.run(sampling_graph(EIGHT, "CPSampler", TWO)))
    assert apart(exact, want) <= EXACT, "and leaves none behind"


def test_so_many_first_steps_are_exact(server: Server) -> None:
    """Of two runs alike up to there; more are nearer."""
    want = latent_of(server.client.run(sampling_graph(EIGHT, "KSampler")))
    far = []
    for warmup in (1, 4, 7):
        got = latent_of(server.client.run(sampling_graph(EIGHT, "CPSampler", replace(PATCHED, warmup_steps=warmup))))
        far.append(apart(got, want))
    assert far[0] > far[1] > far[2] > BAR


@pytest.mark.sweep
@pytest.mark.parametrize(
    "parallel",
    [
        Parallel(pipeline_degree=2, cfg_degree=2),
        Parallel(pipeline_degree=2, data_degree=2),
        Parallel(pipeline_degree=2, ulysses_degree=2),
    ],
    ids=["cfg 2", "data 2", "ulysses 2"],
)
def test_patches_are_the_same_with_others(server: Server, parallel: Parallel) -> None:
    asked = replace(EIGHT, batch=2)
    want = latent_of(server.client.run(sampling_graph(asked, "CPSampler", PATCHED)))
    got = latent_of(server.client.run(sampling_graph(asked, "CPSampler", replace(parallel, patches=2))))
    assert apart(got, want) <= BAR


@pytest.mark.parametrize(
    ("steps", "parallel", "sentence"),
    [
        (4, PATCHED, r"a run of 4 step\(s\) changes too much.*take 8 steps or more, or set patches to 1"),
        (8, replace(PATCHED, warmup_steps=8), "warmup_steps is 8 of 8 steps"),
        (8, replace(PATCHED, patches=64), "patches is 64, and this latent makes 35 tokens"),
        (8, replace(PATCHED, step_cache=0.1), r"step_cache 0\.1.*set step_cache to 0"),
        (8, replace(PATCHED, compile="on"), r"patches 2 cannot go with.*torch\.compile.*set patches to 1"),
        (8, replace(PATCHED, pipeline_degree=1), "patches 2 needs a pipeline; set patches to 1"),
    ],
)
def test_what_patches_cannot_do_is_refused_by_name(
    server: Server, steps: int, parallel: Parallel, sentence: str
) -> None:
    with pytest.raises(NodeError, match=rf"(?s){sentence}"):
        server.client.run(sampling_graph(replace(EIGHT, steps=steps), "CPSampler", parallel))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda graph: with_nodes(
                graph, (Node("NAGuidance", {"nag_scale": 5.0, "nag_alpha": 0.5, "nag_tau": 1.5}),)
            ),
            r"model patches \(attn1_output_patch",
        ),
        (lambda graph: with_nodes(graph, (step_cache("EasyCache"),)), "a step cache"),
        (with_control_net, "the loop stays in ComfyUI's process.*set patches to 1"),
    ],
    ids=["a patch", "EasyCache", "a ControlNet"],
)
def test_what_is_on_the_model_is_refused_with_patches(
    server: Server, change: Callable[[Graph], Graph], sentence: str
) -> None:
    with pytest.raises(NodeError, match=rf"(?s)patches 2 (?:cannot|does not) .*{sentence}"):
        server.client.run(change(sampling_graph(EIGHT, "CPSampler", PATCHED)))


def test_a_native_sampler_has_the_patches_of_the_loader(server: Server) -> None:
    want = latent_of(server.client.run(sampling_graph(EIGHT, "CPSampler", PATCHED)))
    since = server.log_size()
    got = latent_of(server.client.run(on_the_loader(sampling_graph(EIGHT, "KSampler"), EIGHT, PATCHED)))
    assert apart(got, want) <= BAR
    assert "[CP] approximate" in server.log(since)


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        (PATCHED, "Stages: .*Approximate, not the picture of one GPU: after 1 exact step"),
        (
            replace(PATCHED, patches=64),
            r"cannot work: patches is 64, and this latent makes 35 tokens.*\nWith patches 35:",
        ),
        (replace(PATCHED, pipeline_degree=1), r"cannot work: patches 2 needs a pipeline.*\nWith patches 1:"),
    ],
    ids=["can", "too many", "no pipeline"],
)
def test_cp_plan_says_what_comes_of_patches(server: Server, parallel: Parallel, says: str) -> None:
    graph = sampling_graph(EIGHT, "CPSampler", parallel)
    wants = {name: [name, 0] for name in ("model", "positive")}
    inputs = {**wants, "latent_image": ["latent", 0], "cp_config": ["config", 0], "cfg": 2.0}
    graph["plan"] = {"class_type": "CPPlan", "inputs": inputs}
    del graph["sampler"], graph["save"]
    (text,) = server.client.run(graph).outputs["plan"]["text"]
    assert re.search(says, text), text


@pytest.mark.sweep(one_in=5)
@pytest.mark.parametrize(
    "sampler",
    ["heun", "euler_ancestral", "dpm_adaptive", "dpmpp_2m_sde", "uni_pc", "dpmpp_sde", "res_multistep", "seeds_3",
     "sa_solver", "lcm"],
)  # fmt: skip
def test_samplers_of_every_kind_in_stages(server: Server, sampler: str) -> None:
    asked = replace(EIGHT, sampler=sampler, scheduler="beta")
    want = latent_of(server.client.run(sampling_graph(asked, "KSampler")))
    assert apart(latent_of(server.client.run(sampling_graph(asked, "CPSampler", TWO))), want) <= BAR
    if sampler != "dpm_adaptive":  # it takes other steps
        got = latent_of(server.client.run(sampling_graph(asked, "CPSampler", PATCHED)))
        assert apart(got, want) < 0.35, "approximate"
