"""A file becomes a transformer: every parameter filled, nothing fetched, and every complaint says what is wrong."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from safetensors.torch import load_file, save_file

from parallel_runtime.families import recognise
from parallel_runtime.families.header import header
from parallel_runtime.worker.loading import Loaded, load, parameters_on_meta

from .. import tiny

FLOAT: dict[str, Any] = {"weight_dtype": torch.float32, "compute_dtype": torch.float32}
NAMES = list(tiny.TINY)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return {name: tiny.write(folder, name) for name in NAMES}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("loading reached for the network")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def _output(loaded: Loaded, name: str, height: int = 0) -> torch.Tensor:
    told = tiny.TINY[name]
    channels = loaded.family.config()["in_channels"] if told.clip_vision else told.latent[1]
    shape = (1, channels, *told.latent[2:-2], height or told.latent[-2], told.latent[-1])
    generator = torch.Generator().manual_seed(5)
    cond = {
        "c_crossattn": torch.randn(1, *told.text, generator=generator),
        "clip_fea": torch.randn(1, 257, 1280, generator=generator) if told.clip_vision else None,
        "guidance": torch.tensor([told.guidance]) if told.guidance is not None else None,
        "y": torch.randn(1, told.pooled, generator=generator) if told.pooled else None,
        "attention_mask": torch.ones(1, told.text[0], dtype=torch.long) if told.mask else None,
        "frame_rate": told.frame_rate or None,
    }
    x = torch.randn(shape, generator=generator)
    with torch.inference_mode():
        return loaded.family.call(loaded.transformer, x, torch.tensor([0.7]), cond)


def _mapped(tensor: torch.Tensor) -> str:
    """The line of /proc/self/maps that a tensor lies in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(address, 16) for address in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return line
    return ""


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_filled_and_every_tensor_is_used(checkpoints: dict[str, Path], name: str) -> None:
    loaded = load(checkpoints[name], **FLOAT, hints=tiny.hints(name))
    assert not [n for n, t in loaded.transformer.state_dict().items() if t.is_meta]
    assert not [n for n, b in loaded.transformer.named_buffers() if b.is_meta]
    assert not any(p.requires_grad for p in loaded.transformer.parameters())
    assert not loaded.transformer.training


@pytest.mark.parametrize("name", NAMES)
def test_a_full_checkpoint_gives_the_same_model(checkpoints: dict[str, Path], tmp_path: Path, name: str) -> None:
    others = {"first_stage_model.conv.weight": torch.ones(2), "text_encoders.t5.weight": torch.ones(2)}
    full = tiny.write(tmp_path, name, prefix="model.diffusion_model.", beside=others)
    hints = tiny.hints(name)
    plain = _output(load(checkpoints[name], **FLOAT, hints=hints), name)
    torch.testing.assert_close(_output(load(full, **FLOAT, hints=hints), name), plain)


@pytest.mark.parametrize("name", ["flux_dev"])
def test_norms_may_be_called_weight(checkpoints: dict[str, Path], tmp_path: Path, name: str) -> None:
    renamed = {key.replace("_norm.scale", "_norm.weight"): t for key, t in load_file(checkpoints[name]).items()}
    save_file(renamed, tmp_path / "f.safetensors")
    plain = _output(load(checkpoints[name], **FLOAT), name)
    torch.testing.assert_close(_output(load(tmp_path / "f.safetensors", **FLOAT), name), plain)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_weights_are_rounded_to_the_weight_dtype_and_stored_in_the_compute_dtype(
    checkpoints: dict[str, Path], tmp_path: Path, stored: torch.dtype
) -> None:
    rounded = load(checkpoints["wan_t2v"], weight_dtype=stored, compute_dtype=torch.float32)
    narrow = load(tiny.write(tmp_path, "wan_t2v", dtype=stored), weight_dtype=stored, compute_dtype=stored)
    for name, parameter in rounded.transformer.named_parameters():
        other = narrow.transformer.get_parameter(name)
        assert parameter.dtype == torch.float32
        assert other.dtype == (torch.float32 if name.startswith("patch_embedding.") else stored)
        if not name.startswith("patch_embedding."):
            assert torch.equal(parameter, other.float()), name


def test_parameters_are_views_of_the_file_where_nothing_changes(checkpoints: dict[str, Path]) -> None:
    transformer = load(checkpoints["flux_dev"], **FLOAT).transformer
    attention = transformer.transformer_blocks[0].attn
    query, key = attention.to_q.weight, attention.to_k.weight
    assert query.untyped_storage().data_ptr() == key.untyped_storage().data_ptr()
    assert checkpoints["flux_dev"].name in _mapped(query)


def test_progress_ends_at_one(checkpoints: dict[str, Path]) -> None:
    shares: list[float] = []
    load(checkpoints["flux_dev"], **FLOAT, on_share=shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_patch_sees_the_files_names_and_changes_what_is_loaded(checkpoints: dict[str, Path]) -> None:
    def patch(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 0 if name == "double_blocks.0.img_attn.qkv.weight" else tensor

    attention = load(checkpoints["flux_dev"], **FLOAT, patch=patch).transformer.transformer_blocks[0].attn
    assert not attention.to_v.weight.any()
    assert attention.add_v_proj.weight.any()


def test_a_missing_parameter_is_named(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    state = load_file(checkpoints["flux_dev"])
    del state["txt_in.bias"]
    save_file(state, tmp_path / "f.safetensors")
    with pytest.raises(ValueError, match=r"does not give the transformer its context_embedder\.bias"):
        load(tmp_path / "f.safetensors", **FLOAT)


def test_an_unexpected_parameter_is_named(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    save_file({**load_file(checkpoints["flux_dev"]), "img_in.extra": torch.ones(1)}, tmp_path / "f.safetensors")
    with pytest.raises(ValueError, match=r"has img_in\.extra, for which this transformer has no place"):
        load(tmp_path / "f.safetensors", **FLOAT)


def test_a_wrong_shape_is_named(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    state = load_file(checkpoints["flux_dev"])
    state["txt_in.bias"] = torch.zeros(3)
    save_file(state, tmp_path / "f.safetensors")
    said = r"txt_in\.bias gives context_embedder\.bias the shape \(3,\), it takes \(256,\)"
    with pytest.raises(ValueError, match=said):
        load(tmp_path / "f.safetensors", **FLOAT)


def test_an_unknown_model_is_described(tmp_path: Path) -> None:
    save_file({"unknown.weight": torch.zeros(1)}, tmp_path / "f.safetensors")
    with pytest.raises(ValueError, match=r"no family knows this checkpoint \(it has unknown\.weight\)"):
        load(tmp_path / "f.safetensors", **FLOAT)


def test_building_without_memory_leaves_other_threads_and_buffers_alone() -> None:
    register = torch.nn.Module.register_parameter
    with parameters_on_meta():
        layer = torch.nn.BatchNorm1d(3)
    assert layer.weight.is_meta
    assert layer.running_mean is not None
    assert not layer.running_mean.is_meta
    assert torch.nn.Module.register_parameter is register


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_counted_from_the_latent(checkpoints: dict[str, Path], name: str) -> None:
    family = recognise(header(checkpoints[name]).shapes, tiny.hints(name))
    tokens = family.tokens(tiny.TINY[name].latent, tiny.TINY[name].text[0])
    assert tokens["image"] > 0
    assert family.heads > 0
    assert family.layers > 0


@pytest.mark.parametrize(
    ("name", "latent", "cond", "says"),
    [
        ("sd35_large", (1, 16, 1000, 8), {}, "knows 64 latent pixels a side, the latent has 1000 x 8"),
        ("wan_flf2v", (1, 16, 3, 8, 8), {"clip_fea": torch.zeros(1, 771, 1280)}, "514 tokens of CLIP .* got 771"),
        ("hunyuan_video", (1, 16, 3, 8, 8), {"c_crossattn": torch.zeros(1, 9, 96), "attention_mask": torch.ones(1, 9)},
         "attention_mask is floating point"),
    ],
)  # fmt: skip
def test_what_a_family_has_no_answer_to_is_said_before_it_is_called(
    name: str, latent: tuple[int, ...], cond: dict[str, Any], says: str
) -> None:
    family = recognise({key: tuple(tensor.shape) for key, tensor in tiny.tensors(name)[0].items()}, tiny.hints(name))
    told = tiny.TINY[name]
    family.check(told.latent, {"c_crossattn": torch.zeros(1, *told.text)})
    with pytest.raises(ValueError, match=says):
        family.check(latent, cond)
