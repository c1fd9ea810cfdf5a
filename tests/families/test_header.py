"""A header is believed only where it adds up with the file."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from parallel_runtime.errors import Refused
from parallel_runtime.families.formats import refuse_quantised
from parallel_runtime.families.header import header

ROOT = Path(__file__).parents[2]


def _file(path: Path, entries: Any, data: bytes = b"") -> Path:
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def _entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_shapes_formats_and_metadata_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / "f", {"say": "so"})
    read = header(tmp_path / "f")
    assert dict(read.shapes) == {"a": (2, 3), "b": (4,)}
    assert dict(read.dtypes) == {"a": "F32", "b": "BF16"}
    assert read.metadata == {"say": "so"}
    assert read.bytes == 32


def test_only_the_transformer_of_a_full_checkpoint_counts(tmp_path: Path) -> None:
    names = ("model.diffusion_model.a", "first_stage_model.b", "text_encoders.c")
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "f")
    read = header(tmp_path / "f")
    assert list(read.shapes) == ["a"]
    assert read.prefix == "model.diffusion_model."


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(100)}, tmp_path / "f")
    whole = (tmp_path / "f").read_bytes()
    for kept in (len(whole) - 1, 20, 8):
        (tmp_path / "f").write_bytes(whole[:kept])
        with pytest.raises(ValueError, match="cut short"):
            header(tmp_path / "f")


@pytest.mark.parametrize(
    "content", [b"", b"short", b"\xff" * 64, b"<!DOCTYPE html><html>", b"PK\x03\x04\0\0\x08\x08" + b"\0" * 60]
)
def test_what_is_not_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(ValueError, match="not a safetensors file"):
        header(tmp_path / "f")


def test_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"GGUF" + b"\0" * 60)
    with pytest.raises(ValueError, match="GGUF"):
        header(tmp_path / "f")


@pytest.mark.parametrize(
    "entries",
    [
        {"a": _entry([3], 0, 8)},
        {"a": _entry([2], 0, 8), "b": _entry([2], 4, 12)},
        {"a": _entry([2], 4, 12)},
        {"a": _entry([1], 0, 4)},
    ],
    ids=["size", "overlap", "gap", "unexplained"],
)
def test_a_header_that_does_not_add_up_is_refused(tmp_path: Path, entries: Any) -> None:
    with pytest.raises(ValueError, match=r"lies about|does not explain"):
        header(_file(tmp_path / "f", entries, bytes(12)))


@pytest.mark.parametrize(
    "entry",
    [{}, [], {"dtype": "F32"}, _entry([-1], 0, 4), _entry([1], 0, 4, "F7"), {**_entry([1], 0, 4), "shape": ["1"]}],
)
def test_a_senseless_entry_is_refused(tmp_path: Path, entry: Any) -> None:
    with pytest.raises(ValueError, match="makes no sense"):
        header(_file(tmp_path / "f", {"a": entry}, bytes(4)))


JUNK = [None, True, -1, 2**70, 1.5, "x", [], [[0, 8]], {}, "F32", ["F32"], {"format": 3}]


def test_a_lying_header_is_believed_nowhere(tmp_path: Path) -> None:
    """Every place of a good header says something else, in turn."""
    good = {"__metadata__": {"format": "pt"}, "a": _entry([2, 1], 0, 8), "b": _entry([1], 8, 12)}
    for name in good:
        for lie in [*JUNK, *({**good[name], key: junk} for key in good[name] for junk in JUNK)]:
            path = _file(tmp_path / "f", {**good, name: lie}, bytes(12))
            try:
                read = header(path)
            except ValueError:
                continue
            assert read.bytes == 12
            assert all(isinstance(text, str) for pair in read.metadata.items() for text in pair)


def test_a_header_as_deep_as_the_sea_is_refused(tmp_path: Path) -> None:
    text = b"[" * 100_000
    (tmp_path / "f").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(ValueError, match="not a safetensors file"):
        header(tmp_path / "f")


def test_a_header_that_is_no_object_is_refused(tmp_path: Path) -> None:
    for entries in ([1], "text", 3):
        with pytest.raises(ValueError, match="no JSON object"):
            header(_file(tmp_path / "f", entries))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("img_in.comfy_quant", "comfy_quant"),
        ("scaled_fp8", "scaled fp8"),
        ("img_in.scale_weight", "scaled fp8"),
        ("transformer_blocks.0.qkv_proj.wscales", "Nunchaku"),
        ("img_in.weight.quant_state.bitsandbytes__nf4", "bitsandbytes"),
        ("img_in.qweight", "GPTQ"),
    ],
)
def test_quantised_weights_are_refused_by_name(tmp_path: Path, name: str, kind: str) -> None:
    save_file({name: torch.ones(1), "img_in.weight": torch.ones(2, 2)}, tmp_path / "f")
    with pytest.raises(ValueError, match=f"{kind}.*{name}"):
        refuse_quantised(header(tmp_path / "f"))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_weights_in_eight_bits_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"img_in.weight": torch.zeros(2, 2).to(dtype)}, tmp_path / "f")
    with pytest.raises(ValueError, match=r"stores img_in\.weight as"):
        refuse_quantised(header(tmp_path / "f"))


def test_families_need_no_diffusers_and_the_header_needs_nothing() -> None:
    code = (
        "import sys, parallel_runtime.families; assert not {'diffusers', 'comfy', 'safetensors'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    alone = (
        "import sys, importlib.util as u; sys.modules['parallel_runtime.families'] = type(sys)('families')\n"
        "spec = u.spec_from_file_location('parallel_runtime.families.header', 'parallel_runtime/families/header.py')\n"
        "sys.modules[spec.name] = made = u.module_from_spec(spec); spec.loader.exec_module(made)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", alone], check=True, cwd=ROOT)


def test_what_is_wrong_with_a_file_is_refused_with_the_way_out(tmp_path: Path) -> None:
    contents = {
        "rubbish": (b"<!DOCTYPE html><html>", "take the model's safetensors file"),
        "gguf": (b"GGUF" + bytes(60), "take the model's safetensors file"),
        "nested": (struct.pack("<Q", 200_000) + b"[" * 200_000, "take the model's safetensors file"),
        "short": (struct.pack("<Q", 999) + b"{}", "download or copy it again"),
    }
    for name, (content, way_out) in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(Refused, match=f"{name}.*; {way_out}"):
            header(tmp_path / name)
    for metadata in ({"a": 1}, [1], "text"):
        with pytest.raises(Refused, match=r"not made of texts.*; download or copy it again"):
            header(_file(tmp_path / "f", {"__metadata__": metadata}))
