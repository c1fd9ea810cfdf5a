"""Files that no worker can read, in CP Load Diffusion Model: each is refused in one sentence with the way out."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import save

from ..zoo import checkpoints
from .client import Graph, NodeError
from .graphs import Job, sampling_graph
from .server import Server
from .test_kin import on_the_loader

FLUX = Job(family="flux_dev")


def flux(**more: torch.Tensor) -> bytes:
    return save({**{name: tensor.contiguous() for name, tensor in checkpoints.tensors("flux_dev")[0].items()}, **more})


def lying() -> bytes:
    header = json.dumps({"img_in.weight": {"dtype": "F32", "shape": [1000, 1000], "data_offsets": [0, 8]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(8)


def odd_metadata() -> bytes:
    header = json.dumps({"__metadata__": {"config": 1}}).encode()
    return struct.pack("<Q", len(header)) + header


AGAIN = "is not a valid safetensors file.*download or copy it again"
FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "rubbish": (lambda: b"<!DOCTYPE html>" * 99, f"bad_rubbish.safetensors {AGAIN}"),
    "truncated": (lambda: flux()[:-1000], f"bad_truncated.safetensors {AGAIN}"),
    "lying": (lying, f"bad_lying.safetensors {AGAIN}"),
    "odd_metadata": (odd_metadata, f"bad_odd_metadata.safetensors {AGAIN}"),
    "gguf": (lambda: b"GGUF" + bytes(99), "bad_gguf.safetensors is a GGUF file.*install ComfyUI-GGUF"),
    "unknown": (lambda: save({"some.weight": torch.zeros(2, 2)}),
                "cannot load the model in .*bad_unknown.*take one that Load"),
}  # fmt: skip


@pytest.mark.sweep(one_in=4)
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_read_is_refused_with_the_way_out(server: Server, name: str) -> None:
    before = server.children()
    content, says = FILES[name]
    path = server.base / "models" / "diffusion_models" / f"bad_{name}.safetensors"
    path.write_bytes(content())
    with pytest.raises(NodeError, match=rf"CPLoadDiffusionModel: .*Refused: .*{says}") as raised:
        server.client.run(loading(path.name))
    print(raised.value)
    assert server.children() == before


def loading(file: str) -> Graph:
    graph = on_the_loader(sampling_graph(FLUX, "KSampler"), FLUX)
    graph["model"]["inputs"]["unet_name"] = file
    return graph
