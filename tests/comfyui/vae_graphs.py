"""Prompts with a VAE, with CP VAE before it or without, and how far what they make is apart."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from .client import Graph
from .graphs import Parallel
from .latents import saved_latents
from .server import Server

BAR = 1e-5
TWO = Parallel(ring_degree=2, ulysses_degree=1, devices="cpu,cpu")
THREE = Parallel(ring_degree=3, ulysses_degree=1, devices="cpu,cpu,cpu")
nonces = itertools.count(1)


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def with_vae(file: str, parallel: Parallel | bool | None) -> Graph:
    """`parallel` False: without CP VAE; None: CP VAE without a cp_config."""
    return in_workers("vae", node("VAELoader", vae_name=file), parallel)


def in_workers(kind: str, loader: dict[str, Any], parallel: Parallel | bool | None) -> Graph:
    """A graph whose node `kind` gives what `loader` loads: through CP VAE or CP CLIP, unless `parallel` is False."""
    if parallel is False:
        return {kind: loader}
    graph = {"loader": loader, kind: node(f"CP{kind.upper()}", **{kind: ["loader", 0]})}
    if isinstance(parallel, Parallel):
        graph["config"] = node("CPParallelConfig", **vars(parallel))
        graph[kind]["inputs"]["cp_config"] = ["config", 0]
    return graph


def decoding(file: str, shape: str, parallel: Parallel | bool | None, **extra: Any) -> Graph:
    graph = with_vae(file, parallel)
    graph["latent"] = node("CPTestLatent", shape=shape, seed=5, masked=False, nonce=next(nonces))
    graph["seeded"] = node("CPTestSeed", latent=["latent", 0], seed=3, nonce=next(nonces))
    graph["decode"] = node(extra.pop("decoder", "VAEDecode"), samples=["seeded", 0], vae=["vae", 0], **extra)
    graph["draw"] = node("CPTestDraw", after=["decode", 0], name=f"draw_{next(nonces)}")
    graph["save"] = node("CPTestSavePictures", images=["decode", 0], name=f"pictures_{next(nonces)}")
    return graph


def encoding(file: str, shape: str, parallel: Parallel | bool | None) -> Graph:
    graph = with_vae(file, parallel)
    graph["pictures"] = node("CPTestPictures", shape=shape, seed=6, nonce=next(nonces))
    graph["encode"] = node("VAEEncode", pixels=["pictures", 0], vae=["vae", 0])
    graph["save"] = node("CPTestSaveLatent", samples=["encode", 0], name=f"latent_{next(nonces)}")
    return graph


def result(server: Server, graph: Graph) -> dict[str, torch.Tensor]:
    return saved_latents(server.client.run(graph, timeout=300))


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    return float((got - want).norm() / want.norm())


def both(server: Server, make: Any, file: str, shape: str, parallel: Parallel | None, **extra: Any) -> float:
    """How far CP VAE is from ComfyUI alone; it did run in the workers."""
    want = result(server, make(file, shape, False, **extra))
    since = server.log_size()
    got = result(server, make(file, shape, parallel, **extra))
    log = server.log(since)
    assert "[CP] VAE" in log, "the workers were not asked"
    assert "in ComfyUI's process" not in log
    if "draw" in want:
        assert torch.equal(got["draw"], want["draw"]), "the random generator is somewhere else"
    return relative(got["save"], want["save"])
