"""What workers refuse in the middle of their work is read as a sentence, and costs neither workers nor models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ..groups import faulty
from .cases import DEGREES
from .client import Graph, NodeError
from .comfy import ComfyInstall
from .graphs import Job, Parallel, sampling_graph
from .latents import latent_of
from .server import Server, running_server
from .test_foreign import hooked, on_the_model
from .test_kin import on_the_loader

RING_2, ULYSSES_2 = DEGREES["ring_2"], DEGREES["ulysses_2"]
FLUX = Job(family="flux_dev", cfg=2.0, steps=6, prompt_tokens=(7, 20))


@pytest.mark.parametrize("parallel", [RING_2, ULYSSES_2], ids=["ring", "ulysses"])
def test_a_plans_guard_is_read_alone_and_the_workers_and_their_model_stay(server: Server, parallel: Parallel) -> None:
    before = latent_of(server.client.run(sampling_graph(FLUX, "CPSampler", parallel)))
    workers, since = {process.pid for process in server.workers().values()}, server.log_size()
    for _ in range(2):
        with pytest.raises(NodeError) as refused:
            server.client.run(on_the_model("CPTestForeignWrapper", job=FLUX, kind="unheard_of_patch")(parallel))
        sentence = (
            r"CPSampler: \S*Refused: unheard_of_patch .*would run inside blocks, .* set ring and Ulysses degrees to 1"
        )
        assert re.fullmatch(sentence, str(refused.value).strip()), refused.value
    assert server.client.get("/cp/status")["state"] == "idle"
    assert torch.equal(latent_of(server.client.run(sampling_graph(FLUX, "CPSampler", parallel))), before)
    assert {process.pid for process in server.workers().values()} == workers
    loaded = re.findall(r"loaded in ([\d.]+) s", server.log(since))
    assert [float(seconds) < 0.2 for seconds in loaded] == [True], "the model stayed"


def test_a_file_that_chose_its_attention_has_no_ring(server: Server) -> None:
    folder, name = server.base / "models" / "diffusion_models", "chooses_its_attention.safetensors"
    (folder / name).symlink_to(folder / "flux_dev.safetensors")

    def graph(parallel: Parallel | None) -> Graph:
        made = on_the_model("CPTestTampered", job=FLUX, kind="own attention")(parallel)
        made["model"]["inputs"]["unet_name"] = name
        return made

    with pytest.raises(NodeError, match=r"the attention \S+attention_split gives no log-sum-exp.*ring_degree is 2"):
        server.client.run(graph(RING_2))
    want = latent_of(server.client.run(sampling_graph(FLUX, "KSampler")))
    for parallel in (Parallel(devices="cpu,cpu", cfg_degree=1), ULYSSES_2):
        assert (latent_of(server.client.run(graph(parallel))) - want).abs().max() <= 1e-4 * want.std()
        assert server.client.get("/cp/status")["degrees"]["ring_degree"] == 1


def sharded(parallel: Parallel) -> Graph:
    return sampling_graph(FLUX, "CPSampler", replace(parallel, weights="shard"))


def cached(parallel: Parallel) -> Graph:
    return sampling_graph(replace(FLUX, steps=12), "CPSampler", replace(parallel, step_cache=0.6))


def plain(parallel: Parallel) -> Graph:
    return sampling_graph(FLUX, "CPSampler", parallel)


def native(parallel: Parallel) -> Graph:
    return on_the_loader(sampling_graph(FLUX, "KSampler"), FLUX, parallel)


RUNS: dict[str, Callable[[Parallel], Graph]] = {
    "plain": plain, "sharded": sharded, "cached": cached, "scheduled LoRA": hooked, "in ComfyUI's process": native,
}  # fmt: skip


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Touched, it has workers refuse once more."""
    (file := tmp_path_factory.mktemp("refusing") / "again").touch()
    return file


@pytest.fixture(scope="module")
def refusing(comfy: ComfyInstall, again: Path) -> Iterator[Server]:
    """Its workers refuse once, all of them in the middle of their third forward."""
    faults = faulty("0 attention refuse;1 attention refuse") | {"CP_TEST_AGAIN": str(again)}
    with running_server(comfy, env=faults) as server:
        yield server


@pytest.mark.sweep
@pytest.mark.parametrize("parallel", [RING_2, ULYSSES_2], ids=["ring", "ulysses"])
@pytest.mark.parametrize("what", RUNS)
def test_after_a_refusal_in_the_middle_of_a_forward_runs_are_as_from_fresh_workers(
    server: Server, refusing: Server, again: Path, what: str, parallel: Parallel
) -> None:
    again.touch()
    with pytest.raises(NodeError, match=r"Refused: sabotage cannot be honoured; leave it\s*$"):
        refusing.client.run(RUNS[what](parallel))
    workers = {process.pid for process in refusing.workers().values()}
    assert len(workers) == 2
    for run in (what, "plain", what):
        want = latent_of(server.client.run(RUNS[run](parallel)))
        assert torch.equal(latent_of(refusing.client.run(RUNS[run](parallel))), want), run
    assert {process.pid for process in refusing.workers().values()} == workers
