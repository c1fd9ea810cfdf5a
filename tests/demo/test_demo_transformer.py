"""The demo's network is filled from ComfyUI's file, computes what ComfyUI's own computes, and goes back to the bit."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_runtime.demo import HEADS, MODEL, transformer

from ..comfyui.comfy import find_comfy, why_there_is_none
from ..zoo.checkpoints import write

ROOT = Path(__file__).parents[2]
EXACT = 1e-5  # of the output's standard deviation
COMFYUIS_ANSWER = """
import sys, torch
from safetensors.torch import load_file, save_file
from tests.zoo import tiny
tiny.start_comfyui()
import comfy.sd
model, *asked = sys.argv[1:]
network = comfy.sd.load_diffusion_model(model, model_options={"dtype": torch.float32}).model.diffusion_model.float()
with torch.inference_mode():
    for path in asked:
        call = load_file(path)
        save_file({"out": network(call.pop("x"), call.pop("timestep"), **call).contiguous()}, f"{path}.answer")
"""
SIZES = {"even": (16, 16), "odd": (17, 21)}


def test_the_shipped_file_comes_back_to_the_bit() -> None:
    network, file = transformer.load(MODEL), load_file(MODEL)
    again = transformer.to_checkpoint(network.state_dict())
    assert again.keys() == file.keys()
    assert all(torch.equal(again[name], tensor.float()) for name, tensor in file.items())
    assert network.config.num_attention_heads == HEADS


def test_parameters_are_views_of_the_file_where_nothing_changes(tmp_path: Path) -> None:
    attention = transformer.load(write(tmp_path, "flux_schnell")).transformer_blocks[0].attn
    query, key = attention.to_q.weight, attention.to_k.weight
    assert query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
    assert "cp_tiny_flux_schnell" in _mapping_of(query)


def call_of(size: str) -> dict[str, torch.Tensor]:
    """Two rows with the same prompt."""
    generator, shapes = torch.Generator().manual_seed(3), ((2, 16, *SIZES[size]), (1, 7, 128), (1, 64))
    x, text, y = (torch.randn(shape, generator=generator) for shape in shapes)
    return {"x": x, "timestep": torch.tensor([0.7, 0.3]), "context": text.repeat(2, 1, 1), "y": y.repeat(2, 1)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a model, each size's call, and what ComfyUI answers to it."""
    comfy = find_comfy()
    if comfy is None:
        pytest.skip(why_there_is_none())
    folder = tmp_path_factory.mktemp("comfyuis")
    for size in SIZES:
        save_file(call_of(size), folder / size)
    files = (write(folder, "flux_schnell"), *(folder / size for size in SIZES))
    done = subprocess.run(
        [str(part) for part in (comfy.python, "-c", COMFYUIS_ANSWER, *files)],
        cwd=ROOT,
        env={**os.environ, "COMFYUI_PATH": str(comfy.root), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("size", SIZES)
def test_it_computes_what_comfyui_computes(folder: Path, size: str) -> None:
    call, want = call_of(size), load_file(folder / f"{size}.answer")["out"]
    conds = {"c_crossattn": call["context"][:1], "y": call["y"][:1]}
    with torch.inference_mode():
        got = transformer.evaluate(transformer.load(write(folder, "flux_schnell")), call["x"], call["timestep"], conds)
    assert got.shape == call["x"].shape
    assert float((got - want).abs().max() / want.std()) <= EXACT


def _mapping_of(tensor: torch.Tensor) -> str:
    """The line of /proc/self/maps that a tensor lies in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(address, 16) for address in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return line
    return ""
