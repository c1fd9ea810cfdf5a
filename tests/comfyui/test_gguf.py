"""GGUF files, by CP Load Diffusion Model and the loaders of ComfyUI-GGUF, where that pack is installed, or
$COMFYUI_GGUF_PATH is a checkout of it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from .cases import DEGREES
from .client import Graph
from .comfy import ComfyInstall
from .graphs import Job, Parallel, sampling_graph, with_loras
from .latents import apart, latent_of
from .server import Server, running_server
from .test_clip import ENCODED, LORA, NATIVELY, PROMPT, encoding, result
from .test_clip_stages import STAGED, limited
from .test_kin import node
from .vae_graphs import TWO

JOB = Job(family="flux_dev", cfg=2.0, size=(9, 14), prompt_tokens=(7, 12))
BARS = [("ring_2", 1e-5), ("pipeline_2", 1e-5), pytest.param("1_worker", 1e-6, marks=pytest.mark.sweep)]
PLAIN = {"class_type": "CLIPTextEncode", "text": PROMPT}
KINDS = ("F16", "BF16", "Q8_0", "Q5_1", "Q4_0")
ENCODER_KINDS = ("Q8_0", "BF16", "Q4_0")
RANDOM = """
import sys, torch
root, folder = sys.argv[1:]
sys.argv[1:], sys.path[:0] = ["--cpu"], [root]
import comfy.options
comfy.options.enable_args_parsing()
from comfy.sd1_clip import SDClipModel
from comfy.text_encoders.sa_t5 import T5BaseModel
from safetensors.torch import save_file
dice = torch.Generator().manual_seed(0)
for name, kind in (("clip_l", SDClipModel), ("t5base", T5BaseModel)):
    layers = kind(device="meta", dtype=torch.float32, model_options={}).transformer.state_dict()
    shapes = {key: weight.shape for key, weight in layers.items() if "position_ids" not in key}
    random = {key: torch.randn(shape, generator=dice) * 0.03 for key, shape in shapes.items()}
    random = {key: one + (one.ndim == 1 and "bias" not in key) for key, one in random.items()}
    save_file(random, f"{folder}/{name}.safetensors")
"""
WRITE = """
import sys, gguf
from safetensors.torch import load_file
source, target, kind, arch = sys.argv[1:]
kind = getattr(gguf.GGMLQuantizationType, kind)
writer = gguf.GGUFWriter(target, arch=arch)
for name, tensor in load_file(source).items():
    plain = tensor.ndim < 2 or tensor.shape[-1] % 32 or "position" in name
    held = gguf.GGMLQuantizationType.F32 if plain else kind
    array = tensor.float().numpy()
    writer.add_tensor(name, array if plain else gguf.quants.quantize(array, held), raw_dtype=held)
writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
"""


@pytest.fixture(scope="module")
def gguf_server(comfy: ComfyInstall) -> Iterator[Server]:
    pack = Path(os.environ.get("COMFYUI_GGUF_PATH") or comfy.root / "custom_nodes" / "ComfyUI-GGUF")
    if not (pack / "nodes.py").is_file():
        pytest.skip(f"NO COMFYUI-GGUF: looked at {pack}")
    if subprocess.run([comfy.python, "-c", "import gguf"], capture_output=True).returncode:
        pytest.skip("ComfyUI's Python has no gguf, which ComfyUI-GGUF needs")
    with running_server(comfy, packs=(pack,)) as server:
        folder = server.base / "models" / "diffusion_models"
        for kind in KINDS:
            write_gguf(comfy, folder / f"{JOB.family}.safetensors", folder / f"{kind}.gguf", kind, "flux")
        yield server


def write_gguf(comfy: ComfyInstall, source: Path, target: Path, kind: str, arch: str) -> None:
    subprocess.run([comfy.python, "-c", WRITE, source, target, kind, arch], check=True)


def picture(kind: str, loader: str, parallel: Parallel | None, *, lora: bool = False) -> Graph:
    graph = sampling_graph(JOB, "CPSampler" if parallel else "KSampler", parallel)
    graph["model"] = node(loader, unet_name=f"{kind}.gguf")
    return with_loras(graph, [("flux_dev.safetensors", 0.8)] if lora else [])


@pytest.mark.sweep(one_in=7)
@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("degrees", "bar"), BARS)
@pytest.mark.parametrize("loader", ["UnetLoaderGGUF", "CPLoadDiffusionModel"])
def test_a_gguf_file_is_sampled_as_with_the_packs_own_loader(
    gguf_server: Server, loader: str, degrees: str, bar: float, kind: str, lora: bool
) -> None:
    native = latent_of(gguf_server.client.run(picture(kind, "UnetLoaderGGUF", None, lora=lora)))
    got = latent_of(gguf_server.client.run(picture(kind, loader, DEGREES[degrees], lora=lora)))
    print(f"APART {loader} {kind} {degrees} {apart(got, native):.1e}")
    assert apart(got, native) <= bar


@pytest.mark.sweep(one_in=5)
@pytest.mark.parametrize("mode", ["shard", "offload"])
@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_its_weights_may_be_elsewhere_to_the_bit(gguf_server: Server, kind: str, lora: bool, mode: str) -> None:
    def sampled(weights: str) -> Tensor:
        parallel = replace(DEGREES["ring_2"], weights=weights)
        return latent_of(gguf_server.client.run(picture(kind, "CPLoadDiffusionModel", parallel, lora=lora)))

    whole = sampled("replicate")
    assert torch.equal(sampled(mode), whole)
    for rank in gguf_server.client.get("/api/cp/status")["ranks"]:
        weights = rank["weights"][-1]
        assert weights["fetched"] > weights["resident"] / 2


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
def test_it_comes_back_from_main_memory_the_same(gguf_server: Server, lora: bool) -> None:
    graph = picture("Q8_0", "CPLoadDiffusionModel", replace(DEGREES["ring_2"], after_sampling="offload"), lora=lora)
    first, again = (latent_of(gguf_server.client.run({**graph})) for _ in range(2))
    assert torch.equal(again, first)


@pytest.mark.parametrize("mode", ["replicate", "offload"])
def test_a_lora_goes_without_a_trace(gguf_server: Server, mode: str) -> None:
    def sampled(*, lora: bool) -> Tensor:
        parallel = replace(DEGREES["ring_2"], weights=mode)
        return latent_of(gguf_server.client.run(picture("Q8_0", "CPLoadDiffusionModel", parallel, lora=lora)))

    before, patched, after, again = (sampled(lora=lora) for lora in (False, True, False, True))
    assert torch.equal(after, before)
    assert torch.equal(again, patched)
    assert apart(patched, before) > 1e-3


def test_the_packs_other_loader_has_its_own_dtypes_in_the_workers_too(gguf_server: Server) -> None:
    def sampled(parallel: Parallel | None, dtype: str) -> Tensor:
        graph = picture("Q8_0", "UnetLoaderGGUFAdvanced", parallel)
        graph["model"]["inputs"] |= {"dequant_dtype": dtype, "patch_dtype": "default", "patch_on_device": False}
        return latent_of(gguf_server.client.run(graph))

    assert apart(sampled(DEGREES["ring_2"], "bfloat16"), want := sampled(None, "bfloat16")) <= 1e-5
    assert apart(sampled(None, "float32"), want) > 1e-4


@pytest.fixture(scope="module")
def encoders(gguf_server: Server) -> Server:
    """The server with text encoders of ComfyUI's own sizes: the pack's nodes have no options that make smaller ones."""
    comfy, folder = gguf_server.comfy, gguf_server.base / "models" / "text_encoders"
    folder.mkdir(exist_ok=True)
    subprocess.run([comfy.python, "-c", RANDOM, comfy.root, folder], check=True)
    return gguf_server


def both(server: Server, kind: str, *steps: Graph) -> Tensor:
    """A prompt as ComfyUI encodes it and the workers, to the bit: with two files, of which one is plain, and with
    T5-base."""
    folder = server.base / "models" / "text_encoders"
    for name, arch in (("t5base", "t5encoder"), ("clip_l", "qwen3")):
        if not (target := folder / f"{name}_{kind}.gguf").exists():
            write_gguf(server.comfy, folder / f"{name}.safetensors", target, kind, arch)
    two = {"clip_name1": "clip_l.safetensors", "clip_name2": f"clip_l_{kind}.gguf", "type": "sd3"}
    one = {"clip_name": f"t5base_{kind}.gguf", "type": "stable_audio"}
    made = []
    for loader in (node("DualCLIPLoaderGGUF", **two), node("CLIPLoaderGGUF", **one)):
        native, ours = (encoding("sd1", parallel, *steps, **PLAIN) for parallel in (False, TWO))
        native["clip"] = ours["loader"] = loader
        want, since = result(server, native), server.log_size()
        got, log = result(server, ours), server.log(since)
        assert ENCODED in log
        assert NATIVELY not in log
        assert torch.isfinite(want).all()
        assert torch.equal(got, want)
        made.append(want)
    return torch.cat(made)


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("kind", ENCODER_KINDS)
def test_a_gguf_text_encoder_is_encoded_in_the_workers_to_the_bit(encoders: Server, kind: str) -> None:
    plain = both(encoders, kind)
    assert not torch.equal(both(encoders, kind, LORA), plain)
    assert torch.equal(both(encoders, kind), plain), "the LoRA is gone again"


def test_a_gguf_text_encoder_is_in_stages_where_no_worker_has_room(encoders: Server) -> None:
    with limited(encoders, 150, 150):
        since = encoders.log_size()
        plain = both(encoders, "Q8_0")
        assert STAGED in encoders.log(since)
        assert not torch.equal(both(encoders, "Q8_0", LORA), plain)
