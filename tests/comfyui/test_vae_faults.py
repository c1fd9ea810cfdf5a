"""What goes wrong in workers while a VAE runs: ComfyUI's own ways out stay open, and nothing is silently wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from .comfy import ComfyInstall
from .server import Server, running_server
from .vae_graphs import BAR, TWO, decoding, relative, result

SMALL, LARGE = "1,16,1,9,12", "1,16,1,36,32"  # the fault waits for more than a tile of 32 x 32


@pytest.fixture(scope="module")
def faulty(comfy: ComfyInstall) -> Iterator[Server]:
    """In rank 1 memory runs out where a latent is large, and group norms are wrong over ranks."""
    faults = "1 convert out_of_memory;1 group_norm shift"
    with running_server(comfy, env={"CP_TEST_FAULT": faults}) as server:
        server.write_tiny("vaes")
        yield server


@pytest.mark.sweep
def test_a_worker_out_of_memory_leaves_comfyui_its_tiles_which_workers_decode(faulty: Server) -> None:
    tiles = {"decoder": "VAEDecodeTiled", "tile_size": 256, "overlap": 64, "temporal_size": 64, "temporal_overlap": 8}
    want = result(faulty, decoding("wan.safetensors", LARGE, False, **tiles))["save"]
    since = faulty.log_size()
    got = result(faulty, decoding("wan.safetensors", LARGE, TWO))["save"]
    log = faulty.log(since)
    assert "rank 1" in log
    assert log.count("retrying with tiled VAE decoding") == 1
    assert "[CP] VAE decoded on 2 worker(s)" in log
    assert relative(got, want) <= BAR


@pytest.mark.sweep
def test_after_it_the_next_decode_is_whole_again(faulty: Server) -> None:
    want = result(faulty, decoding("wan.safetensors", SMALL, False))["save"]
    since = faulty.log_size()
    assert relative(result(faulty, decoding("wan.safetensors", SMALL, TWO))["save"], want) <= BAR
    assert "tiled" not in faulty.log(since)


@pytest.mark.sweep
def test_a_class_that_fails_its_self_test_runs_in_comfyuis_process_with_one_line(faulty: Server) -> None:
    shape = "1,16,8,6"
    want = result(faulty, decoding("flux.safetensors", shape, False))["save"]
    since = faulty.log_size()
    for _ in range(2):
        assert torch.equal(result(faulty, decoding("flux.safetensors", shape, TWO))["save"], want)
    log = faulty.log(since)
    assert log.count("CP VAE decodes and encodes in ComfyUI's process") == 1
    assert "self-test" in log or "another worker could not" in log
    assert "[CP] VAE decoded" not in log
    assert faulty.workers(), "nobody died of it"
