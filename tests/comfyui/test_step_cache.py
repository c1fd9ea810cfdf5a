"""First-block caching in a running ComfyUI: what the widget does, and what it leaves alone."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from .client import Graph, Interrupted
from .graphs import Job, Parallel, longer, sampling_graph
from .latents import apart, latent_of
from .server import Server
from .test_foreign import WINDOWS, on_the_model

BAR = 1e-4
# Where the tiny models skip some evaluations and not all: their weights are random, so each step changes much.
THRESHOLDS = {"flux_dev": 0.6, "wan_t2v": 0.2, "qwen_image": 0.8}
JOBS = {
    "flux_dev": Job(family="flux_dev", steps=12, cfg=2.0, size=(9, 14), prompt_tokens=(7, 20)),
    "flux_dev, an area": Job(family="flux_dev", steps=12, cfg=2.0, second_prompt=True),
    "flux_dev, batch of two": Job(family="flux_dev", steps=12, cfg=2.0, batch=2, sampler="heun"),
    "wan_t2v": Job(family="wan_t2v", steps=12, cfg=2.0),
    "qwen_image": Job(family="qwen_image", steps=12, cfg=2.0, prompt_tokens=(20, 1), text_mask_valid=11),
}
DEGREES = {
    "ring_2": Parallel(ring_degree=2, ulysses_degree=1, cfg_degree=1),
    "ulysses_2": Parallel(ring_degree=1, ulysses_degree=2, cfg_degree=1),
    "cfg_2": Parallel(ring_degree=1, ulysses_degree=1, cfg_degree=2),
    "data_2": Parallel(ring_degree=1, ulysses_degree=1, cfg_degree=1, data_degree=2),
    "ring_3": Parallel(ring_degree=3, ulysses_degree=1, cfg_degree=1),
    "cfg_2_x_ulysses_2": Parallel(ring_degree=1, ulysses_degree=2, cfg_degree=2),
}
CASES = {
    "ring_2": list(JOBS),
    "ulysses_2": ["flux_dev", "wan_t2v"],
    "cfg_2": ["flux_dev", "flux_dev, an area", "qwen_image"],
    "data_2": ["flux_dev, batch of two"],
    "ring_3": ["flux_dev", "wan_t2v", "qwen_image"],
    "cfg_2_x_ulysses_2": ["flux_dev", "flux_dev, batch of two"],
}
ALONE = Parallel(ring_degree=1, ulysses_degree=1)
FLUX = JOBS["flux_dev"]
CACHED = replace(DEGREES["ring_2"], step_cache=THRESHOLDS["flux_dev"])

Sampled = tuple[torch.Tensor, list[tuple[int, int]]]


def sample(server: Server, job: Job, parallel: Parallel) -> Sampled:
    """The latent, and what the log says was skipped of how many evaluations."""
    since = server.log_size()
    latent = latent_of(server.client.run(sampling_graph(job, "CPSampler", parallel)))
    return latent, skipped_in(server.log(since))


def skipped_in(log: str) -> list[tuple[int, int]]:
    counts = re.findall(r"worker\(s\): sampled in .* s, step cache skipped (\d+) of (\d+) evaluations", log)
    return [(int(skipped), int(evaluations)) for skipped, evaluations in counts]


@pytest.fixture(scope="session")
def alone(shared_server: Server) -> dict[str, Sampled]:
    """Each job cached on one worker."""
    return {
        name: sample(shared_server, job, replace(ALONE, step_cache=THRESHOLDS[job.family]))
        for name, job in JOBS.items()
    }


@pytest.mark.sweep
@pytest.mark.parametrize(("degrees", "name"), [(degrees, name) for degrees, names in CASES.items() for name in names])
def test_however_the_work_is_divided_the_same_is_skipped(
    server: Server, alone: dict[str, Sampled], degrees: str, name: str
) -> None:
    want, ((skipped, evaluations),) = alone[name]
    threshold = THRESHOLDS[JOBS[name].family]
    got, counts = sample(server, JOBS[name], replace(DEGREES[degrees], step_cache=threshold))
    assert 0 < skipped < evaluations
    assert counts == [(skipped, evaluations)]
    assert apart(got, want) <= BAR


def test_at_threshold_0_nothing_is_cached_and_no_bit_differs(server: Server) -> None:
    def without_the_widget() -> torch.Tensor:
        graph = sampling_graph(FLUX, "CPSampler", DEGREES["ring_2"])
        del graph["config"]["inputs"]["step_cache"]
        return latent_of(server.client.run(graph))

    want = without_the_widget()
    cached, _ = sample(server, FLUX, CACHED)
    got, counts = sample(server, FLUX, replace(CACHED, step_cache=0.0))
    assert counts == []
    assert torch.equal(got, want)
    assert torch.equal(got, without_the_widget())
    assert apart(cached, want) > 10 * BAR, "skipping shows"


def test_a_threshold_that_nothing_stays_under_changes_no_more_than_rounding(server: Server) -> None:
    want, _ = sample(server, FLUX, DEGREES["ring_2"])
    got, counts = sample(server, FLUX, replace(CACHED, step_cache=0.001))
    assert counts == [(0, 2 * FLUX.steps)]
    assert apart(got, want) <= BAR


def test_another_threshold_neither_loads_nor_starts_anything(server: Server) -> None:
    sample(server, FLUX, CACHED)
    workers, since = server.workers(), server.log_size()
    sample(server, FLUX, replace(CACHED, step_cache=0.3))
    assert re.search(r"loaded in 0\.0\d s", server.log(since))
    assert server.workers() == workers


def test_cp_plan_measures_one_worker_with_the_step_cache_of_several(server: Server) -> None:
    graph = sampling_graph(FLUX, "CPSampler", CACHED)
    wants = {name: [name, 0] for name in ("model", "positive")}
    inputs = {**wants, "latent_image": ["latent", 0], "cp_config": ["config", 0], "cfg": FLUX.cfg, "measure": True}
    graph["plan"] = {"class_type": "CPPlan", "inputs": inputs}
    del graph["sampler"], graph["save"]
    (plan,) = server.client.run(graph).outputs["plan"]["cp_plan"]
    assert [pace["workers"] for pace in plan["times"]] == [1, 2], "paces of the same work"


def test_a_run_starts_with_nothing_from_the_last_one_also_after_cancel(server: Server) -> None:
    fresh, counts = sample(server, FLUX, CACHED)
    again, counts_again = sample(server, FLUX, CACHED)
    since = server.client.now()
    prompt = server.client.queue(sampling_graph(longer(FLUX, steps=2000), "CPSampler", CACHED))
    server.client.wait_for_step(3, since=since)
    server.client.interrupt(prompt)
    with pytest.raises(Interrupted):
        server.client.finish(prompt, since=since, timeout=10)
    after_cancel, counts_after_cancel = sample(server, FLUX, CACHED)
    assert counts == counts_again == counts_after_cancel
    assert torch.equal(again, fresh)
    assert torch.equal(after_cancel, fresh)


def test_each_context_window_is_compared_with_itself(server: Server) -> None:
    """In one step there is nothing to skip, though the windows are alike in prompt and size; in several there is."""
    windows = {**WINDOWS, "causal_window_fix": False}
    for steps, threshold in ((1, 0.9), (12, THRESHOLDS["wan_t2v"])):
        picture = on_the_model("ContextWindowsManual", job=replace(JOBS["wan_t2v"], steps=steps), **windows)
        native = latent_of(server.client.run(picture(None)))
        since = server.log_size()
        ours = latent_of(server.client.run(picture(replace(CACHED, step_cache=threshold))))
        ((skipped, evaluations),) = skipped_in(server.log(since))
        assert evaluations == 4 * steps
        assert (skipped > 0) == (steps > 1)
        assert apart(ours, native) <= (BAR if steps == 1 else 1)


def with_our_loader(graph: Graph) -> Graph:
    """The loader gets the config of the CP Sampler, or one of its own."""
    graph.setdefault("config", {"class_type": "CPParallelConfig", "inputs": vars(CACHED)})
    graph["model"] = {
        "class_type": "CPLoadDiffusionModel",
        "inputs": {"unet_name": "flux_dev.safetensors", "cp_config": ["config", 0]},
    }
    return graph


@pytest.mark.parametrize("sampler", ["CPSampler", "KSampler"])
def test_every_sampler_has_it_on_a_model_of_our_loader_too(server: Server, sampler: str) -> None:
    want, counts = sample(server, FLUX, CACHED)
    since = server.log_size()
    graph = sampling_graph(FLUX, sampler, CACHED if sampler == "CPSampler" else None)
    got = latent_of(server.client.run(with_our_loader(graph)))
    assert "skipped {} of {} evaluations".format(*counts[0]) in server.log(since)
    assert apart(got, want) <= BAR
