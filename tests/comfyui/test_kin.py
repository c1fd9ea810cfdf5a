"""The kin of CP Sampler: advanced, custom, the loader without weights, and the plan."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from .cases import DEGREES
from .client import Graph
from .graphs import Job, Parallel, sampling_graph, with_loras
from .latents import apart, latent_of
from .server import Server

BAR = 1e-4
FLUX = Job(family="flux_dev", cfg=2.0, size=(9, 14), prompt_tokens=(7, 12))
SIDES = {"native": None, "ours": DEGREES["ring_2"]}


def link(node: str, index: int = 0) -> list[Any]:
    return [node, index]


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def advanced(job: Job, parallel: Parallel | None, **widgets: Any) -> Graph:
    """Two samplers in a row: the first leaves noise, the second takes over."""
    graph = sampling_graph(job, "CPSampler" if parallel else "KSampler", parallel)
    common = {key: value for key, value in graph["sampler"]["inputs"].items() if key not in ("seed", "denoise")}
    kind = "CPSamplerAdvanced" if parallel else "KSamplerAdvanced"
    graph["first"] = node(
        kind, **common, noise_seed=job.seed, add_noise="enable", start_at_step=0, end_at_step=2,
        return_with_leftover_noise="enable",
    )  # fmt: skip
    second = {**common, "latent_image": link("first")}
    graph["sampler"] = node(
        kind, **second, noise_seed=0, add_noise="disable", start_at_step=2, end_at_step=10000,
        return_with_leftover_noise="disable",
    )  # fmt: skip
    return graph


def custom(job: Job, parallel: Parallel | None, guider: dict[str, Any], sampler: dict[str, Any], output: int) -> Graph:
    graph = sampling_graph(job, "CPSampler" if parallel else "KSampler", parallel)
    graph["third"] = {**graph["negative"], "inputs": {**graph["negative"]["inputs"], "seed": 77}}
    graph["noise"] = node("RandomNoise", noise_seed=job.seed)
    graph["guider"] = guider
    graph["algorithm"] = sampler
    graph["sigmas"] = node("BasicScheduler", model=link("model"), scheduler="beta", steps=job.steps, denoise=1.0)
    graph["sampler"] = node(
        "CPSamplerCustom" if parallel else "SamplerCustomAdvanced",
        noise=link("noise"), guider=link("guider"), sampler=link("algorithm"), sigmas=link("sigmas"),
        latent_image=link("latent"), **({"cp_config": link("config")} if parallel else {}),
    )  # fmt: skip
    graph["save"]["inputs"]["samples"] = link("sampler", output)
    return graph


GUIDERS = {
    "BasicGuider": node("BasicGuider", model=link("model"), conditioning=link("positive")),
    "CFGGuider": node("CFGGuider", model=link("model"), positive=link("positive"), negative=link("negative"), cfg=2.5),
    "DualCFGGuider": node(
        "DualCFGGuider", model=link("model"), cond1=link("positive"), cond2=link("third"), negative=link("negative"),
        cfg_conds=2.0, cfg_cond2_negative=1.5, style="regular",
    ),
}  # fmt: skip
ALGORITHMS = {
    "KSamplerSelect": node("KSamplerSelect", sampler_name="euler"),
    "SamplerDPMPP_2M_SDE": node(
        "SamplerDPMPP_2M_SDE", solver_type="midpoint", eta=0.7, s_noise=1.1, noise_device="cpu"
    ),
    "SamplerEulerAncestral": node("SamplerEulerAncestral", eta=0.5, s_noise=1.0),
    "SamplerER_SDE": node("SamplerER_SDE", solver_type="ER-SDE", max_stage=3, eta=1.0, s_noise=1.0),
    "SamplerDPMAdaptative": node(
        "SamplerDPMAdaptative", order=3, rtol=0.5, atol=0.5, h_init=0.05, pcoeff=0.0, icoeff=1.0, dcoeff=0.0,
        accept_safety=0.81, eta=0.0, s_noise=1.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "native"),
    [
        ("CPSampler", "KSampler"),
        ("CPSamplerAdvanced", "KSamplerAdvanced"),
        ("CPSamplerCustom", "SamplerCustomAdvanced"),
        ("CPSamplerCustomBasic", "SamplerCustom"),
    ],
)
def test_a_cp_sampler_has_the_native_ones_sockets_and_widgets_in_its_order(
    server: Server, ours: str, native: str
) -> None:
    info = server.client.get("/object_info")
    wanted, got = info[native]["input"], info[ours]["input"]
    assert list(got["required"]) == list(wanted["required"])
    assert list(got["optional"]) == [*wanted.get("optional", {}), "cp_config"]
    for name, (kind, *options) in wanted["required"].items():
        assert choices(got["required"][name]) == choices([kind, *options]), name
        for key in ("default", "min", "max", "step", "round", "control_after_generate", "advanced"):
            assert dict(*got["required"][name][1:]).get(key) == dict(*options).get(key), (name, key)
    assert info[ours]["output"] == info[native]["output"]
    assert info[ours]["output_name"] == info[native]["output_name"]


def test_a_config_needs_no_more_than_two_numbers_and_keeps_the_order_of_its_widgets(server: Server) -> None:
    info = server.client.get("/object_info/CPParallelConfig")["CPParallelConfig"]
    assert info["input_order"]["required"] == ["ring_degree", "ulysses_degree"]
    saved = ["rotate_method", "convert_to_fp32", "attention_backend", "dtype", "devices", "cfg_degree", "data_degree"]
    assert info["input_order"]["optional"][: len(saved)] == saved, "workflows hold widgets by their places"


def choices(widget: list[Any]) -> Any:
    """A combo's options, in the old spelling and the new; any other socket's type."""
    return widget[1]["options"] if widget[0] == "COMBO" else widget[0]


def test_two_advanced_samplers_in_a_row_are_the_native_pair(server: Server) -> None:
    native, ours = (latent_of(server.client.run(advanced(FLUX, parallel))) for parallel in SIDES.values())
    assert apart(ours, native) <= BAR


@pytest.mark.sweep(one_in=7)
@pytest.mark.parametrize("output", [0, 1], ids=["output", "denoised_output"])
@pytest.mark.parametrize("guider", GUIDERS)
def test_a_custom_run_is_the_native_one_with_every_guider(server: Server, guider: str, output: int) -> None:
    native, ours = (
        latent_of(server.client.run(custom(FLUX, parallel, GUIDERS[guider], ALGORITHMS["KSamplerSelect"], output)))
        for parallel in SIDES.values()
    )
    assert apart(ours, native) <= BAR


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "KSamplerSelect"])
def test_a_custom_run_is_the_native_one_with_every_sampler_node(server: Server, algorithm: str) -> None:
    native, ours = (
        latent_of(server.client.run(custom(FLUX, parallel, GUIDERS["CFGGuider"], ALGORITHMS[algorithm], 0)))
        for parallel in SIDES.values()
    )
    assert apart(ours, native) <= BAR


@pytest.mark.parametrize("add_noise", [True, False], ids=["noise", "no noise"])
def test_a_custom_run_without_a_guider_is_the_native_one(server: Server, add_noise: bool) -> None:
    def graph(parallel: Parallel | None) -> Graph:
        graph = custom(FLUX, parallel, GUIDERS["CFGGuider"], ALGORITHMS["SamplerEulerAncestral"], 1)
        kept = ("sampler", "sigmas", "latent_image", "cp_config")
        sockets = {name: value for name, value in graph["sampler"]["inputs"].items() if name in kept}
        graph["sampler"] = node(
            "CPSamplerCustomBasic" if parallel else "SamplerCustom",
            model=link("model"), positive=link("positive"), negative=link("negative"), cfg=FLUX.cfg,
            add_noise=add_noise, noise_seed=FLUX.seed, **sockets,
        )  # fmt: skip
        return graph

    native, ours = (latent_of(server.client.run(graph(parallel))) for parallel in SIDES.values())
    assert apart(ours, native) <= BAR


def on_the_loader(graph: Graph, job: Job, parallel: Parallel | None = None) -> Graph:
    graph["model"] = node("CPLoadDiffusionModel", unet_name=f"{job.family}.safetensors")
    if parallel is not None:
        graph["loader_config"] = node("CPParallelConfig", **vars(parallel))
        graph["model"]["inputs"]["cp_config"] = link("loader_config")
    return graph


@pytest.mark.sweep(one_in=7)
@pytest.mark.parametrize("family", ["flux_dev", "flux_schnell", "wan_t2v"])
@pytest.mark.parametrize("sampler", ["KSampler", "CPSampler"])
def test_a_model_without_weights_samples_like_one_with_them(server: Server, family: str, sampler: Any) -> None:
    for seed in (7, 8):
        job = replace(FLUX, family=family, seed=seed)
        native = latent_of(server.client.run(sampling_graph(job, "KSampler")))
        parallel = DEGREES["ulysses_2"]
        graph = sampling_graph(job, sampler, parallel if sampler == "CPSampler" else None)
        ours = latent_of(server.client.run(on_the_loader(graph, job, parallel)))
        assert apart(ours, native) <= BAR


def test_a_lora_on_a_model_without_weights_counts(server: Server) -> None:
    def graph(strength: float, ours: bool) -> Graph:
        graph = sampling_graph(FLUX, "KSampler")
        if ours:
            on_the_loader(graph, FLUX, DEGREES["ring_2"])
        return with_loras(graph, [("flux_dev.safetensors", strength)])

    for strength in (1.0, -0.5, 0.0):
        native, ours = (latent_of(server.client.run(graph(strength, ours))) for ours in (False, True))
        assert server.client.get("/cp/status")["state"] == "idle", "the run is over as soon as its sampler is"
        assert apart(ours, native) <= BAR, strength


def wait_for(condition: Callable[[], bool], *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)


def test_free_reaches_the_workers_and_the_next_run_loads_again(server: Server) -> None:
    since = server.log_size()
    first = latent_of(server.client.run(sampling_graph(FLUX, "CPSampler", DEGREES["ring_2"])))
    server.client.run(sampling_graph(replace(FLUX, seed=8), "CPSampler", DEGREES["ring_2"]))
    workers = server.workers()
    server.client.free()
    wait_for(lambda: "unloading the workers' model" in server.log(since), seconds=2)
    freed = server.log_size()
    again = latent_of(server.client.run(sampling_graph(FLUX, "CPSampler", DEGREES["ring_2"])))
    assert apart(again, first) == 0
    assert server.workers() == workers
    assert "Requested to load WorkerModel" in server.log(freed)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            Parallel(ring_degree=2, ulysses_degree=1),
            r"ring_degree 2 x ulysses_degree 1\.(.*\n)+Note: 2 workers share",
        ),
        (
            Parallel(ring_degree=2, ulysses_degree=1, devices="cpu"),
            r"cannot work: ring_degree 2(.*\n)+With ring_degree 1:",
        ),
        (
            Parallel(ring_degree=1, ulysses_degree=1, cfg_degree=2, weights="shard"),
            r"Note: weights shard: each worker computes its prompt or image alone.*set cfg_degree and data_degree to 1",
        ),
        (None, "One worker, nothing is divided"),
    ],
    ids=["fits", "does not fit", "nobody to share with", "no config"],
)
@pytest.mark.sweep
def test_the_plan_says_what_will_run_and_what_is_wrong(server: Server, config: Parallel | None, says: str) -> None:
    graph = sampling_graph(FLUX, "CPSampler", config)
    graph["plan"] = node("CPPlan", model=link("model"), latent_image=link("latent"), positive=link("positive"), cfg=2.0)
    if config is not None:
        graph["plan"]["inputs"]["cp_config"] = link("config")
    graph["sampler"]["inputs"]["cp_config"] = link("plan", 1)
    run = server.client.run(graph)
    (text,) = run.outputs["plan"]["text"]
    assert re.search(says, text), text
    assert "35 image + 7 text" in text
    native = latent_of(server.client.run(sampling_graph(FLUX, "KSampler")))
    assert apart(latent_of(run), native) <= BAR
