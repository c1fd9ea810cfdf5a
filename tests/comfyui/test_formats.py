"""Every format of a file that ComfyUI reads gives KSampler's latent: the workers load it by ComfyUI's own loader."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from .cases import DEGREES
from .client import Graph
from .comfy import ComfyInstall
from .graphs import Job, Parallel, sampling_graph
from .latents import apart, latent_of
from .server import Server
from .test_kin import link, node, on_the_loader
from .write_formats import FORMATS

JOB = Job(family="flux_dev", cfg=2.0, size=(9, 14), prompt_tokens=(7, 12))
ALONE, SEVERAL = DEGREES["1_worker"], DEGREES["ring_2"]
EXACT, DIVIDED = 1e-6, 1e-5  # of the latent's standard deviation
ROUNDED = {"int8": 3e-2, "int8_convrot": 3e-2}  # activations are rounded too: one unit in the last place flips codes


@pytest.fixture(scope="module")
def files(comfy: ComfyInstall, shared_server: Server) -> Path:
    models = shared_server.base / "models"
    folder = models / "diffusion_models"
    script = Path(__file__).with_name("write_formats.py")
    source = folder / f"{JOB.family}.safetensors"
    subprocess.run([comfy.python, script, comfy.root, source, folder], check=True, capture_output=True)
    for name in FORMATS:
        (models / "checkpoints" / f"{name}.safetensors").symlink_to(folder / f"{JOB.family}_{name}.safetensors")
    return folder


def picture(name: str, parallel: Parallel | None, *, weight_dtype: str = "default", lora: bool = False) -> Graph:
    graph = sampling_graph(JOB, "CPSampler" if parallel else "KSampler", parallel)
    graph["model"]["inputs"] |= {
        "unet_name": f"{JOB.family}{name and '_'}{name}.safetensors",
        "weight_dtype": weight_dtype,
    }
    if lora:
        graph["lora"] = node(
            "LoraLoaderModelOnly", model=link("model"), lora_name="flux_dev.safetensors", strength_model=0.8
        )
        graph["sampler"]["inputs"]["model"] = link("lora")
    return graph


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_file_of_any_format_is_sampled_as_ksampler_does(server: Server, files: Path, name: str, lora: bool) -> None:
    native, alone, several = (
        latent_of(server.client.run(picture(name, parallel, lora=lora))) for parallel in (None, ALONE, SEVERAL)
    )
    print(f"APART {name} {apart(alone, native):.1e} {apart(several, native):.1e}")
    assert apart(alone, native) <= EXACT
    assert apart(several, native) <= ROUNDED.get(name, DIVIDED)


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("name", FORMATS)
def test_cp_load_diffusion_model_reads_it_too(server: Server, files: Path, name: str) -> None:
    native = latent_of(server.client.run(picture(name, None)))
    for graph in (picture(name, ALONE), on_the_loader(picture(name, None), JOB, ALONE)):
        graph["model"] = node("CPLoadDiffusionModel", unet_name=f"{JOB.family}_{name}.safetensors")
        if "config" in graph and "cp_config" not in graph["sampler"]["inputs"]:
            graph["model"]["inputs"]["cp_config"] = link("config")
        assert apart(latent_of(server.client.run(graph)), native) <= EXACT


@pytest.mark.sweep(one_in=4)
@pytest.mark.parametrize("weight_dtype", ["fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2"])
@pytest.mark.parametrize("name", ["", "bf16", "scaled_fp8"])
def test_the_loaders_weight_dtype_counts(server: Server, files: Path, name: str, weight_dtype: str) -> None:
    native, alone, several = (
        latent_of(server.client.run(picture(name, parallel, weight_dtype=weight_dtype)))
        for parallel in (None, ALONE, SEVERAL)
    )
    assert apart(alone, native) <= EXACT
    assert apart(several, native) <= DIVIDED
