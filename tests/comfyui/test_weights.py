"""Where the weights are at rest changes nothing in the picture: the same bits as with all of them on every worker."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from .. import tiny
from .cases import DEGREES
from .client import Graph
from .comfy import ComfyInstall
from .graphs import Job, Parallel, sampling_graph
from .latents import latent_of
from .server import Server
from .test_kin import link, node

FAMILIES = ("flux_dev", "wan_t2v", "qwen_image")
FORMATS = ("bf16", "scaled_fp8", "int8")
PLACES = {"flux_dev": "double_blocks.0.img_attn.proj", "wan_t2v": "blocks.0.self_attn.q"}
PLACES["qwen_image"] = "transformer_blocks.0.attn.to_q"
CFG_2 = Parallel(ring_degree=2, ulysses_degree=1, cfg_degree=2)
CUTS = {**DEGREES, "cfg_2_x_ring_2": CFG_2}
MODES = ("shard", "offload")


@pytest.fixture(scope="module")
def files(comfy: ComfyInstall, shared_server: Server) -> None:
    """Each family in each format, and a LoRA for each."""
    models = shared_server.base / "models"
    script = Path(__file__).with_name("write_formats.py")
    for family in FAMILIES:
        source = models / "diffusion_models" / f"{family}.safetensors"
        subprocess.run([comfy.python, script, comfy.root, source, source.parent], check=True, capture_output=True)
        save_file(lora_of(family), models / "loras" / f"of_{family}.safetensors")


def lora_of(family: str) -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(6)
    out, inner = tiny.tensors(family)[0][f"{PLACES[family]}.weight"].shape
    return {
        f"diffusion_model.{PLACES[family]}.lora_up.weight": torch.randn(out, 4, generator=dice) * 0.2,
        f"diffusion_model.{PLACES[family]}.lora_down.weight": torch.randn(4, inner, generator=dice) * 0.2,
    }


def picture(family: str, name: str, lora: float, parallel: Parallel, **options: object) -> Graph:
    job = Job(family=family, cfg=2.0, size=(8, 12), prompt_tokens=(7, 12), **{"steps": 2, **options})  # type: ignore[arg-type]
    graph = sampling_graph(job, "CPSampler", parallel)
    graph["model"]["inputs"]["unet_name"] = f"{family}{name and '_'}{name}.safetensors"
    if lora:
        graph["lora"] = node(
            "LoraLoaderModelOnly", model=link("model"), lora_name=f"of_{family}.safetensors", strength_model=lora
        )
        graph["sampler"]["inputs"]["model"] = link("lora")
    return graph


@pytest.fixture(scope="module")
def replicated(shared_server: Server) -> Callable[..., Tensor]:
    """The latent with all weights on every worker, sampled once."""

    def run(family: str, name: str, lora: float, degrees: str) -> Tensor:
        graph = picture(family, name, lora, replace(CUTS[degrees], weights="replicate"))
        return latent_of(shared_server.client.run(graph))

    return functools.cache(run)


@pytest.mark.usefixtures("files")
@pytest.mark.sweep(one_in=9)
@pytest.mark.parametrize("lora", [0.0, 0.8], ids=["plain", "lora"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("degrees", list(CUTS)[1:])
def test_the_bits_are_those_of_whole_weights(
    server: Server, replicated: Callable[..., Tensor], degrees: str, family: str, name: str, mode: str, lora: float
) -> None:
    got = latent_of(server.client.run(picture(family, name, lora, replace(CUTS[degrees], weights=mode))))
    assert torch.equal(got, replicated(family, name, lora, degrees))
