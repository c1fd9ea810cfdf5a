"""CP Load CLIP in a real ComfyUI: what ComfyUI's own loaders give, with the weights in the workers only. And text
encoders that a node has changed in place."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ..zoo.encoder_options import OPTIONS
from .client import Graph, NodeError
from .graphs import Parallel
from .server import Server
from .test_clip import ENCODED, LAYER, LORA, NATIVELY, PROMPT, clips, encoded_alike, encoding, hooked, result
from .test_clip_stages import STAGED, limited
from .test_shared_pages import mapped_bytes
from .vae_graphs import TWO, node

__all__ = ["clips"]  # a fixture
WIDER = 8
nonces = itertools.count(1)
LOADERS = {  # ComfyUI's node, its inputs, and the type of CP Load CLIP
    "one file": ("CLIPLoader", {"clip_name": "clip_l"}, "stable_diffusion"),
    "one file of a type": ("CLIPLoader", {"clip_name": "t5base"}, "stable_audio"),
    "two files": ("DualCLIPLoader", {"clip_name1": "clip_l", "clip_name2": "clip_g"}, "sdxl"),
    "two files of a type": ("DualCLIPLoader", {"clip_name1": "clip_l", "clip_name2": "t5xxl_fp8"}, "flux"),
    "scaled fp8": ("DualCLIPLoader", {"clip_name1": "t5xxl_scaled", "clip_name2": "clip_l"}, "flux"),
    "three files": ("TripleCLIPLoader", {"clip_name1": "clip_l", "clip_name2": "clip_g", "clip_name3": "t5xxl"}, ""),
}
# ComfyUI's SD3 has a width of 4096 for T5 beside CLIP, which only prompts without CLIP do without.
FEW = [[[number, 1.0] for number in (5, 77, 12, 300)]]
TOKENS = node("CPTestEncodeTokens", tokens=json.dumps({"l": [], "g": [], "t5xxl": FEW}))


@pytest.fixture
def small(clips: Server) -> Iterator[Server]:
    """ComfyUI's own loader nodes make tiny encoders of the tiny files."""
    clips.client.post("/cp_test/environment", CP_TEST_CLIP_OPTIONS=json.dumps(OPTIONS))
    yield clips
    clips.client.post("/cp_test/environment", CP_TEST_CLIP_OPTIONS=None)


def loaded(which: str, parallel: Parallel | None, *steps: Graph, text: str = PROMPT) -> Graph:
    """A prompt encoded with ComfyUI's loader, or with CP Load CLIP in its place."""
    class_type, names, kind = LOADERS[which]
    inputs = {name: f"{file}.safetensors" for name, file in names.items()}
    if parallel:
        inputs["clip_name1"] = inputs.pop("clip_name", inputs.get("clip_name1", ""))
    if parallel or kind:
        inputs["type"] = kind or "wan"
    graph = encoding("sd1", False, *steps, class_type="CLIPTextEncode", text=text)
    if not kind:
        graph["encode"] = {**TOKENS, "inputs": TOKENS["inputs"] | {"clip": graph["encode"]["inputs"]["clip"]}}
    graph["clip"] = node("CPLoadCLIP" if parallel else class_type, **inputs)
    if parallel:
        graph["config"] = node("CPParallelConfig", **vars(parallel))
        graph["clip"]["inputs"]["cp_config"] = ["config", 0]
    return graph


def both(server: Server, which: str, *steps: Graph) -> torch.Tensor:
    return encoded_alike(server, loaded(which, None, *steps), loaded(which, TWO, *steps))


@pytest.mark.parametrize("which", LOADERS)
def test_cp_load_clip_gives_the_bits_of_comfyuis_loader_of_as_many_files(small: Server, which: str) -> None:
    both(small, which)


def test_cp_load_clip_offers_the_files_and_types_of_comfyuis_loaders(small: Server) -> None:
    nodes = small.client.get("/object_info")
    offered = {name: values(nodes["CPLoadCLIP"], name) for name in ("clip_name1", "clip_name4", "type")}
    assert offered["clip_name1"] == values(nodes["CLIPLoader"], "clip_name")
    assert offered["clip_name4"] == ["none", *values(nodes["QuadrupleCLIPLoader"], "clip_name4")]
    of_both = values(nodes["CLIPLoader"], "type") + values(nodes["DualCLIPLoader"], "type")
    assert sorted(offered["type"]) == sorted(set(of_both))


def values(described: Any, name: str) -> list[str]:
    kind, *options = {**described["input"]["required"], **described["input"].get("optional", {})}[name]
    return kind if isinstance(kind, list) else options[0]["options"]


def test_a_lora_a_skipped_layer_and_hooks_work_on_cp_load_clip(small: Server) -> None:
    plain = both(small, "two files")
    assert not torch.equal(plain, both(small, "two files", LORA))
    assert not torch.equal(plain, both(small, "two files", LORA, LAYER))
    assert torch.equal(plain, both(small, "two files")), "the LoRA is gone again"
    want, graph = result(small, hooked("sd1", False, scheduled=True)), hooked("sd1", False, scheduled=True)
    graph["clip"] = loaded("one file", TWO)["clip"]
    graph["config"] = loaded("one file", TWO)["config"]
    assert torch.equal(result(small, graph), want)


def test_cp_load_clip_is_in_stages_where_no_worker_has_room(small: Server) -> None:
    with limited(small, 14, 6):
        since = small.log_size()
        both(small, "two files of a type")
        assert STAGED in small.log(since)


def test_where_no_worker_has_room_comfyui_encodes_the_mapped_clip_to_the_same_bits(small: Server) -> None:
    for which in ("two files of a type", "two files", "scaled fp8"):
        want = [result(small, loaded(which, None, *steps)) for steps in ((), (LORA,))]
        with limited(small, 0.01, 0.01):
            since = small.log_size()
            got = [result(small, loaded(which, TWO, *steps)) for steps in ((), (LORA,))]
        assert NATIVELY in small.log(since)
        assert all(map(torch.equal, got, want))
        both(small, which)


def test_a_clip_of_cp_load_clip_is_saved_with_its_lora(small: Server) -> None:
    saved = []
    for parallel in (None, TWO):
        graph, prefix = loaded("two files", parallel, LORA), f"mapped_{next(nonces)}"
        graph["file"] = node("CLIPSave", clip=["step 0", 0], filename_prefix=prefix)
        result(small, graph)
        saved.append({path.name[len(prefix) :]: load_file(path) for path in (small.base / "output").glob(f"{prefix}*")})
    native, ours = saved
    assert native.keys() == ours.keys()
    for name, weights in native.items():
        assert weights.keys() == ours[name].keys()
        assert all(torch.equal(weight, ours[name][key]) for key, weight in weights.items())


def test_comfyuis_process_holds_no_copy_of_the_weights(small: Server) -> None:
    result(small, loaded("one file", TWO))
    wide = {name: size * WIDER if size == 64 else size for name, size in OPTIONS["model_config"].items()}
    small.client.post("/cp_test/environment", CP_TEST_CLIP_OPTIONS=json.dumps({"model_config": wide}))
    path, graph = write_wide(small.base / "models" / "text_encoders"), loaded("one file", TWO)
    graph["clip"]["inputs"]["clip_name1"] = path.name
    before, since = mapped_bytes(small.process.pid, "Anonymous"), small.log_size()
    got = result(small, graph)
    grown = (mapped_bytes(small.process.pid, "Anonymous") - before) / path.stat().st_size
    print(f"a file of {path.stat().st_size / 2**20:.0f} MiB, ComfyUI's process grew by {grown:.2f} of it")
    assert ENCODED in small.log(since)
    assert grown < 0.25
    native = loaded("one file", None)
    native["clip"]["inputs"]["clip_name"] = path.name
    assert torch.equal(got, result(small, native))


def write_wide(folder: Path) -> Path:
    """CLIP-L of a larger width, so that the file is large beside what a process holds anyway."""
    weights = {
        name: weight.repeat(*(WIDER if size == 64 else 1 for size in weight.shape)).contiguous()
        for name, weight in load_file(folder / "clip_l.safetensors").items()
    }
    save_file(weights, path := folder / "wide_clip_l.safetensors")
    return path


BAD = {
    "rubbish": (b"<!DOCTYPE html>" * 99, "is not a valid safetensors file.*download or copy it again"),
    "gguf": (b"GGUF" + bytes(99), "is a GGUF file.*install ComfyUI-GGUF"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_cannot_be_read_is_refused_with_the_way_out(small: Server, name: str) -> None:
    content, says = BAD[name]
    path = small.base / "models" / "text_encoders" / f"bad_{name}.safetensors"
    path.write_bytes(content)
    graph = loaded("one file", TWO)
    graph["clip"]["inputs"]["clip_name1"] = path.name
    with pytest.raises(NodeError, match=rf"CPLoadCLIP: .*Refused: .*{path.name} {says}"):
        result(small, graph)


def test_files_that_are_no_text_encoder_together_are_refused_with_the_way_out(small: Server) -> None:
    graph = loaded("one file", TWO)
    graph["clip"]["inputs"]["clip_name1"] = "t5xxl.safetensors"
    graph["clip"]["inputs"]["type"] = "stable_audio"
    small.client.post("/cp_test/environment", CP_TEST_CLIP_OPTIONS=None)  # of another size than ComfyUI's
    with pytest.raises(NodeError, match=r"CPLoadCLIP: .*Refused: .*cannot load a text encoder from.*t5xxl.*Load CLIP"):
        result(small, graph)


@pytest.mark.parametrize("before", [True, False], ids=["before CP CLIP", "after it"])
@pytest.mark.parametrize("how", ["all", "a column", "a layer"])
def test_weights_that_a_node_changes_in_place_are_noticed(clips: Server, before: bool, how: str) -> None:
    options = json.dumps(OPTIONS | {"nonce": next(nonces)})  # an encoder of its own
    unchanged, since = encoding("sd1", TWO, class_type="CLIPTextEncode", text=PROMPT), clips.log_size()
    unchanged["loader"]["inputs"]["options"] = options
    plain = result(clips, unchanged)
    assert ENCODED in clips.log(since)

    since = clips.log_size()
    graph = encoding("sd1", TWO, node("CPTestChangeClip", how=how), class_type="CLIPTextEncode", text=PROMPT)
    graph["loader"]["inputs"]["options"] = options
    if before:
        graph["step 0"]["inputs"]["clip"], graph["clip"]["inputs"]["clip"] = ["loader", 0], ["step 0", 0]
        graph["encode"]["inputs"]["clip"] = ["clip", 0]
    changed = result(clips, graph)
    log = clips.log(since)
    assert "were changed in place" in log
    assert ENCODED not in log
    assert not torch.equal(changed, plain)
