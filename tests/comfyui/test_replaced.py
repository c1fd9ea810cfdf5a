"""Packs that are merely installed, and replace ComfyUI's and torch's code: a run gives KSampler's picture, in the
workers where these have the same code replaced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from .comfy import ComfyInstall
from .graphs import Parallel
from .latents import apart, latent_of
from .nodes_benches import benches, write_benches
from .nodes_graphs import Trial
from .server import Server, running_server
from .test_foreign import BAR, Picture, on_the_model
from .test_packs import AUTO, SPLIT, unchanged
from .test_unet_nodes import ODD

RIG = Path(__file__).absolute().parent / "rig_replacing"


@pytest.fixture(scope="module")
def replacing(comfy: ComfyInstall, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two packs that replace code as they are imported."""
    folder = tmp_path_factory.mktemp("packs")
    packs = folder / "cp_replacing", folder / "cp_otherwise"
    for pack in packs:
        pack.symlink_to(RIG)
    with running_server(comfy, packs=packs) as server:
        yield server


def check(server: Server, picture: Picture, parallel: Parallel = SPLIT) -> str:
    """Compares with ComfyUI's own sampler; returns what ComfyUI has logged of the run of ours."""
    want, since = latent_of(server.client.run(picture(None))), server.log_size()
    got = latent_of(server.client.run(picture(parallel)))
    print(f"APART {apart(got, want):.1e}")
    assert apart(got, want) <= BAR
    return server.log(since)


def on_a_unet(server: Server) -> Picture:
    write_benches(server, {"unet"})
    info, bench = server.client.get("/object_info"), replace(benches()["unet"], latent=ODD)
    trial = Trial(node="ModelSamplingDiscrete", bench=bench)
    return lambda parallel: trial.graph(info, parallel)


def test_a_loop_whose_code_the_workers_have_replaced_too_runs_there_and_is_split(replacing: Server) -> None:
    log = check(replacing, unchanged)
    assert "on 2 worker(s): sampled in" in log
    assert "runs in ComfyUI's process" not in log
    assert replacing.client.get("/cp/status")["degrees"]["ulysses_degree"] == 2


def test_code_that_packs_put_in_place_of_comfyuis_loop_reads_the_global_variables_that_a_node_has_set(
    replacing: Server,
) -> None:
    """Each of its settings reaches the workers."""
    for what in ("gain", "nothing"):
        assert "on 2 worker(s): sampled in" in check(replacing, on_the_model("CPTest cp_replacing", what=what))


def test_a_network_whose_code_is_replaced_is_sampled_by_comfyui_by_name(replacing: Server) -> None:
    log = check(replacing, on_a_unet(replacing), AUTO)
    assert "another pack has replaced torch.nn.modules.normalization.GroupNorm.forward" in log
    assert "worker(s): sampled in" not in log


def test_a_pack_that_replaces_code_in_the_workers_alone_keeps_its_loop_in_comfyui(replacing: Server) -> None:
    """Also once it has been imported: other workers are started, without it."""
    for _ in range(2):
        log = check(replacing, on_the_model("CPTest cp_otherwise", what="nothing"))
        assert log.count("runs in ComfyUI's process") == 1
        assert "cp_otherwise has not replaced" in log
    assert "on 2 worker(s): sampled in" in check(replacing, unchanged)


def test_code_that_a_node_replaces_in_comfyuis_process_alone_keeps_the_loop_there(replacing: Server) -> None:
    try:
        log = check(replacing, on_the_model("CPTest cp_replacing", what="sampling_function"))
    finally:
        replacing.client.run(on_the_model("CPTest cp_replacing", what="nothing")(None))
    assert "cp_replacing has not replaced comfy.samplers.sampling_function alike" in log
    assert log.count("runs in ComfyUI's process") == 1
