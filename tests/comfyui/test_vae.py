"""CP VAE in a real ComfyUI: the same pictures and latents as without it, for every node that takes a VAE."""

from __future__ import annotations

import os
import re
import time
from typing import Any

import pytest
import torch

from .client import Interrupted, NodeError
from .graphs import Job, Parallel, sampling_graph
from .latents import apart
from .server import Server
from .test_kin import wait_for
from .vae_graphs import BAR, THREE, TWO, both, decoding, encoding, node, nonces, relative, result, with_vae

DECODES = [
    ("wan.safetensors", "1,16,3,11,7"),
    ("wan.safetensors", "2,16,1,5,8"),
    ("taef1", "2,16,9,14"),
    ("ltx0.safetensors", "1,128,2,5,4"),
    ("ltx1.safetensors", "1,128,2,4,5"),
    ("minimax_h3.safetensors", "1,24,12,9,7"),
]
ENCODES = [
    ("wan.safetensors", "5,75,60,3"),
    ("flux.safetensors", "2,45,70,4"),
    ("taef1", "1,60,33,3"),
    ("ltx0.safetensors", "9,160,131,3"),
    ("minimax_h3.safetensors", "19,75,140,3"),  # whose frames ComfyUI's own formula counts wrong
]
WITH_THREE = [
    (decoding, "wan.safetensors", "1,16,2,6,9"),
    (decoding, "flux.safetensors", "2,16,7,5"),
    (decoding, "ltx1.safetensors", "1,128,2,4,5"),
    (decoding, "taef1", "1,16,2,1"),  # fewer rows than workers
    (decoding, "minimax_h3.safetensors", "2,24,1,5,6"),
    (encoding, "minimax_h3.safetensors", "40,64,90,3"),
    (encoding, "wan.safetensors", "1,45,70,4"),
]


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize(("file", "shape"), DECODES)
def test_decodes_the_same_pictures(vaes: Server, file: str, shape: str) -> None:
    assert both(vaes, decoding, file, shape, TWO) <= BAR


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize(("file", "shape"), ENCODES)
def test_encodes_the_same_latents(vaes: Server, file: str, shape: str) -> None:
    assert both(vaes, encoding, file, shape, TWO) <= BAR


def test_tiles_are_decoded_by_the_workers_too(vaes: Server) -> None:
    tiles = {"decoder": "VAEDecodeTiled", "tile_size": 64, "overlap": 16, "temporal_size": 64, "temporal_overlap": 8}
    assert both(vaes, decoding, "taef1", "1,16,16,12", TWO, **tiles) <= BAR


def test_minimax_h3_with_its_own_tiles_runs_in_the_workers_where_tiles_are_asked_for(vaes: Server) -> None:
    tiles = {"decoder": "VAEDecodeTiled", "tile_size": 64, "overlap": 16, "temporal_size": 64, "temporal_overlap": 8}
    assert both(vaes, decoding, "minimax_h3.safetensors", "1,24,7,6,9", TWO, **tiles) <= BAR


def test_without_a_config_it_uses_the_workers_that_are_there(vaes: Server) -> None:
    result(vaes, decoding("taef1", "1,16,8,8", TWO))
    before = vaes.workers()
    assert both(vaes, decoding, "taef1", "1,16,10,7", None) <= BAR
    assert vaes.workers() == before


@pytest.mark.sweep
def test_the_page_follows_a_decode_and_free_drops_the_vae_too(vaes: Server) -> None:
    graph, since = decoding("wan.safetensors", "1,16,4,12,12", TWO), vaes.client.now()
    want = result(vaes, graph)["save"]
    shown = [event.data for event in vaes.client.events(since) if event.kind == "cp.status"]
    assert "decoding" in [status["state"] for status in shown]
    assert all(status["step"] <= status["steps"] for status in shown if status["state"] == "decoding")
    assert vaes.client.get("/cp/status")["state"] == "idle"
    assert "WanVAE" in vaes.client.post("/cp/free")["freed"]
    assert torch.equal(result(vaes, decoding("wan.safetensors", "1,16,4,12,12", TWO))["save"], want)


def test_two_vaes_in_turn_are_loaded_once_each_and_keep_apart(vaes: Server) -> None:
    shape, files = "1,16,2,5,6", ("wan.safetensors", "other_wan.safetensors")
    want = {file: result(vaes, decoding(file, shape, False))["save"] for file in files}
    for file in files:
        result(vaes, decoding(file, shape, TWO))
    since = vaes.log_size()
    for file in files * 2:
        assert relative(result(vaes, decoding(file, shape, TWO))["save"], want[file]) <= BAR
    assert vaes.log(since).count("loaded in 0.0") == 4
    assert relative(want[files[0]], want[files[1]]) > 0.1


@pytest.mark.sweep
def test_a_sampler_and_a_decode_share_the_workers_twice(vaes: Server) -> None:
    job = Job(family="wan_t2v", cfg=2.0, size=(10, 12))

    def whole(parallel: Parallel | None) -> tuple[torch.Tensor, torch.Tensor]:
        graph = sampling_graph(job, "CPSampler" if parallel else "KSampler", parallel)
        loaded = with_vae("wan.safetensors", parallel or False)
        graph |= {name: made for name, made in loaded.items() if name != "config" or name not in graph}
        graph["decode"] = node("VAEDecode", samples=["sampler", 0], vae=["vae", 0])
        graph["pictures"] = node("CPTestSavePictures", images=["decode", 0], name=f"video_{next(nonces)}")
        saved = result(vaes, graph)
        return saved["save"], saved["pictures"]

    latent, pictures = whole(None)
    for _ in range(2):
        ours = whole(TWO)
        assert apart(ours[0], latent) <= 1e-4
        assert float((ours[1] - pictures).abs().max()) <= 1e-3


def test_image_to_video_encodes_through_it(vaes: Server) -> None:
    def concat(parallel: Parallel | bool) -> torch.Tensor:
        graph = with_vae("wan.safetensors", parallel)
        graph["text"] = node("CPTestConditioning", spec='{"tokens": 3, "dim": 8}', seed=1)
        graph["image"] = node("CPTestPictures", shape="1,48,40,3", seed=2, nonce=next(nonces))
        graph["i2v"] = node(
            "WanImageToVideo", positive=["text", 0], negative=["text", 0], vae=["vae", 0], width=80, height=64,
            length=9, batch_size=1, start_image=["image", 0],
        )  # fmt: skip
        graph["save"] = node("CPTestSaveConcat", conditioning=["i2v", 0], name=f"concat_{next(nonces)}")
        return result(vaes, graph)["save"]

    assert relative(concat(TWO), concat(False)) <= BAR


@pytest.mark.parametrize(
    ("file", "shape", "why"),
    [
        ("pixel_space", "1,3,16,24", "it converts pixels without a network, so there is nothing to divide"),
        ("minimax_h3_audio.safetensors", "1,32,2,9", "audio has no rows to divide"),
    ],
)
def test_a_vae_that_is_not_divided_runs_here_with_one_line_in_the_log_that_says_why(
    vaes: Server, file: str, shape: str, why: str
) -> None:
    want = result(vaes, decoding(file, shape, False))["save"]
    since = vaes.log_size()
    got = result(vaes, decoding(file, shape, TWO))["save"]
    assert torch.equal(got, want)
    assert vaes.log(since).count("CP VAE decodes and encodes in ComfyUI's process") == 1
    assert why in vaes.log(since)


def test_a_file_that_changed_after_it_was_loaded_is_not_what_is_decoded_with(vaes: Server) -> None:
    path = vaes.base / "models" / "vae" / "other_wan.safetensors"
    kept, status = path.read_bytes(), path.stat()
    want = result(vaes, decoding("other_wan.safetensors", "1,16,1,6,6", False))["save"]
    result(vaes, decoding("other_wan.safetensors", "1,16,1,6,6", TWO))
    unload(vaes)
    try:
        path.write_bytes((path.parent / "wan.safetensors").read_bytes())
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        since = vaes.log_size()
        got = result(vaes, decoding("other_wan.safetensors", "1,16,1,6,6", TWO))["save"]
    finally:
        path.write_bytes(kept)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert torch.equal(got, want)
    assert "its file has changed" in vaes.log(since)


def unload(server: Server) -> None:
    """ComfyUI forgets a request that comes while it collects garbage after a prompt: ask until it is done."""
    since = server.log_size()

    def gone() -> bool:
        server.client.post("/free", unload_models=True)
        return "unloading the workers' model" in server.log(since)

    wait_for(gone, seconds=15)


def test_unload_models_drops_it_and_the_next_decode_gives_the_same_bits(vaes: Server) -> None:
    graph = decoding("wan.safetensors", "1,16,2,6,6", TWO)
    want = result(vaes, graph)["save"]
    unload(vaes)
    assert torch.equal(result(vaes, decoding("wan.safetensors", "1,16,2,6,6", TWO))["save"], want)


@pytest.mark.sweep
def test_progress_goes_by_frames(vaes: Server) -> None:
    run = vaes.client.run(decoding("wan.safetensors", "1,16,7,16,16", TWO), timeout=300)
    steps = [event.data for event in run.events if event.kind == "progress" and event.data["max"] == 25]
    assert len(steps) >= 3
    assert steps[-1]["value"] == 25


def test_cancel_ends_a_decode_and_keeps_the_workers(vaes: Server) -> None:
    small = decoding("wan.safetensors", "1,16,1,6,6", TWO)
    want = result(vaes, small)["save"]
    workers, since = vaes.workers(), vaes.client.now()
    prompt = vaes.client.queue(decoding("wan.safetensors", "1,16,21,40,40", TWO))
    vaes.client.wait(lambda e: e.kind == "progress" and e.data["max"] == 81, 120, since)
    asked_at = time.monotonic()
    vaes.client.interrupt(prompt)
    with pytest.raises(Interrupted):
        vaes.client.finish(prompt, since=since, timeout=60)
    assert time.monotonic() - asked_at < 10
    assert torch.equal(result(vaes, decoding("wan.safetensors", "1,16,1,6,6", TWO))["save"], want)
    assert vaes.workers() == workers


@pytest.mark.sweep
def test_a_killed_worker_fails_its_decode_and_the_next_works(vaes: Server) -> None:
    since = vaes.client.now()
    prompt = vaes.client.queue(decoding("wan.safetensors", "1,16,21,40,40", TWO))
    vaes.client.wait(lambda e: e.kind == "progress" and e.data["max"] == 81, 120, since)
    vaes.workers()[1].kill()
    with pytest.raises(NodeError, match=r"(?is)VAEDecode.*(rank|worker).*(SIGKILL|killed|signal|died|gone)"):
        vaes.client.finish(prompt, since=since, timeout=30)
    assert both(vaes, decoding, "wan.safetensors", "1,16,2,6,5", TWO) <= BAR


@pytest.mark.parametrize(("policy", "says"), [("unload", "unloading"), ("offload", "offloading")])
def test_after_a_decode_it_stays_or_goes_as_asked(vaes: Server, policy: str, says: str) -> None:
    parallel = Parallel(**{**vars(TWO), "after_sampling": policy})
    since = vaes.log_size()
    first, second = (result(vaes, decoding("taef1", "1,16,8,8", parallel))["save"] for _ in range(2))
    assert torch.equal(first, second)
    assert vaes.log(since).count(f"{says} the workers' model") == 2


def test_devices_that_do_not_exist_are_refused_by_the_node(vaes: Server) -> None:
    with pytest.raises(NodeError, match="GPU 0 not found"):
        result(vaes, decoding("taef1", "1,16,8,8", Parallel(devices="cpu,0")))


PLANS = [
    ("wan.safetensors", True, r"\nDecode: about \d+\.\d\d GiB in ComfyUI's process .* on each of 2 worker"),
    ("wan.safetensors", False, r"\nDecode: about \d+\.\d\d GiB in ComfyUI's process .* on each of 2 worker"),
    ("flux.safetensors", True, r"\nDecode: about"),  # of a video's first frame
    ("pixel_space", False, "\nDecode: in ComfyUI's process; CP VAE would not divide it: it converts pixels"),
]


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize(("file", "over_workers", "says"), PLANS)
def test_the_plan_has_a_line_for_the_decode(vaes: Server, file: str, over_workers: bool, says: str) -> None:
    graph = sampling_graph(Job(family="wan_t2v", size=(10, 12)), "CPSampler", TWO)
    graph |= {name: made for name, made in with_vae(file, None if over_workers else False).items()}
    graph["plan"] = node(
        "CPPlan", model=["model", 0], latent_image=["latent", 0], positive=["positive", 0], cp_config=["config", 0],
        cfg=1.0, vae=["vae", 0],
    )  # fmt: skip
    graph = {name: graph[name] for name in graph.keys() - {"sampler", "save", "negative"}}
    shown = vaes.client.run(graph).outputs["plan"]
    assert re.search(says, shown["text"][0]), shown["text"][0]
    assert "Decode" in dict(shown["cp_plan"][0]["rows"])


@pytest.mark.parametrize(("file", "shape", "says"), [
    ("flux.safetensors", "1,4,6,5", "expected input"),
    ("wan.safetensors", "1,16,6,5", "index"),
])  # fmt: skip
def test_a_latent_of_another_model_is_comfyuis_own_error_and_workers_live(
    vaes: Server, file: str, shape: str, says: str
) -> None:
    result(vaes, decoding("taef1", "1,16,8,8", TWO))
    before = vaes.workers()
    for parallel in (False, TWO):
        with pytest.raises(NodeError, match=f"VAEDecode: .*{says}"):
            result(vaes, decoding(file, shape, parallel))
    assert vaes.workers() == before


@pytest.mark.sweep  # tests/rows has three ranks too
@pytest.mark.parametrize(("make", "file", "shape"), WITH_THREE)
def test_three_workers_make_the_same(vaes: Server, make: Any, file: str, shape: str) -> None:
    assert both(vaes, make, file, shape, THREE) <= BAR
