"""ComfyUI started with a flag for its attention: two workers have that attention too, on each rank's heads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .client import Graph, NodeError
from .comfy import ComfyInstall
from .graphs import Job, Parallel, sampling_graph
from .latents import apart, latent_of
from .server import SITE, running_server
from .test_kin import link, node

CLOSE = 1e-3  # of the latent's deviation: a rounding may move a number that the stand-in rounds coarsely
STAND_INS = Path(__file__).parents[1] / "stand_ins"


def graph_of(parallel: Parallel | None = None) -> Graph:
    return sampling_graph(Job(family="flux_dev", cfg=1.0, steps=2), "CPSampler" if parallel else "KSampler", parallel)


@pytest.mark.parametrize(
    ("flag", "differs"),
    [("--use-sage-attention", True), pytest.param("--use-split-cross-attention", False, marks=pytest.mark.sweep)],
)
def test_workers_attend_as_comfyuis_flag_says_and_a_ring_that_cannot_is_refused_by_its_name(
    comfy: ComfyInstall, flag: str, differs: bool
) -> None:
    path = os.pathsep.join([SITE, str(STAND_INS)])
    with running_server(comfy, flags=(flag,), env={"PYTHONPATH": path}) as server:
        native = latent_of(server.client.run(graph_of()))
        graph = graph_of(Parallel(devices="cpu,cpu", cfg_degree=1, ulysses_degree=2))
        graph["plan"] = node("CPPlan", model=link("model"), latent_image=link("latent"), positive=link("positive"))
        graph["plan"]["inputs"]["cp_config"] = graph["sampler"]["inputs"]["cp_config"]
        run = server.client.run(graph)
        assert apart(latent_of(run), native) <= CLOSE
        assert f"There is no ring: the attention {flag} gives no log-sum-exp." in run.outputs["plan"]["text"][0]
        own = Parallel(devices="cpu,cpu", ring_degree=2, ulysses_degree=1, attention_backend="native")
        assert (apart(latent_of(server.client.run(graph_of(own))), native) > 5 * CLOSE) == differs
        with pytest.raises(NodeError, match=f"the attention {flag} gives no log-sum-exp.*ring_degree is 2"):
            server.client.run(graph_of(Parallel(devices="cpu,cpu", ring_degree=2, ulysses_degree=1)))
