"""Loaders of packs, whose MODELs and CLIPs do not say where they come from."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import comfy.ops
import comfy.sd
import comfy.utils
import folder_paths
import torch
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io

PREFIX = "packed."  # of the names in a file of this pack


class PackOps(comfy.ops.manual_cast):
    """Layers of the pack's own."""

    class Linear(comfy.ops.manual_cast.Linear):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)


class PackPatcher(ModelPatcher):
    """A MODEL of the pack's own class."""

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        made = super().clone(*args, **kwargs)
        made.__class__ = PackPatcher
        return made


class PackLoader(io.ComfyNode):
    """Loads a file whose weights have other names. `kind`: "names" alone; "layers", "patcher" of the pack's own;
    "dice": another MODEL in each process; "host": it fails in a worker; "pipe": the MODEL is the second in a dict."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestPackLoader", category="cp test", is_dev_only=True,
            inputs=[io.String.Input("name"), io.String.Input("kind")],
            outputs=[io.Model.Output(), io.Custom("PIPE").Output()],
        )  # fmt: skip

    @classmethod
    def execute(cls, name: str, kind: str) -> io.NodeOutput:
        if kind == "host" and "RANK" in os.environ:
            raise RuntimeError("only in ComfyUI")
        path = folder_paths.get_full_path_or_raise("diffusion_models", name)
        state = {key.removeprefix(PREFIX): weight for key, weight in comfy.utils.load_torch_file(path).items()}
        if kind == "dice":
            state = {key: weight + os.getpid() * 1e-9 for key, weight in state.items()}
        options = {"custom_operations": PackOps} if kind == "layers" else {}
        model = comfy.sd.load_diffusion_model_state_dict(dict(state), model_options=options)
        assert model is not None
        if kind == "patcher":
            model.__class__ = PackPatcher
        other = None
        if kind == "pipe":
            other = model
            half = {key: weight * 0.5 for key, weight in state.items()}
            model = comfy.sd.load_diffusion_model_state_dict(half)
        return io.NodeOutput(model, {"model": other, "more": [1]})


class Codes(torch.Tensor):
    """Whole numbers of one byte, each a part of the largest value, as a weight of the pack's own format."""

    largest: float

    @classmethod
    def of(cls, codes: torch.Tensor, largest: float) -> Codes:
        made = codes.as_subclass(cls)
        made.largest = largest
        return made

    def to(self, *args: Any, **kwargs: Any) -> Any:
        return Codes.of(super().to(*args, **kwargs), self.largest)

    def detach(self) -> Codes:
        return self


class CodeOps(comfy.ops.manual_cast):
    """Layers that compute with weights of this format."""

    class Linear(comfy.ops.manual_cast.Linear):
        def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
            if not isinstance(codes := state.get(f"{prefix}weight"), Codes):
                return super()._load_from_state_dict(state, prefix, *args)
            self.weight = torch.nn.Parameter(codes, requires_grad=False)
            if (bias := state.get(f"{prefix}bias")) is not None:
                self.bias = torch.nn.Parameter(bias.float(), requires_grad=False)

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(codes := self.weight, Codes):
                return super().forward(x, *args, **kwargs)
            weight = codes.as_subclass(torch.Tensor).to(x) * (codes.largest / 127)
            for strength, down, up in vars(codes).get("patches", ()):
                weight = weight + strength * (up.to(x) @ down.to(x))
            return torch.nn.functional.linear(x, weight, None if self.bias is None else self.bias.to(x))


class CodePatcher(ModelPatcher):
    """A patcher that hands a LoRA to the layers of this format."""

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        made = super().clone(*args, **kwargs)
        made.__class__ = CodePatcher
        return made

    def patch_weight_to_device(self, key: str, *args: Any, **kwargs: Any) -> Any:
        codes = comfy.utils.get_attr(self.model, key)
        if key not in self.patches or not isinstance(codes, Codes):
            return super().patch_weight_to_device(key, *args, **kwargs)
        made = Codes.of(codes.as_subclass(torch.Tensor), codes.largest)
        each = [(patch[0], patch[1].weights) for patch in self.patches[key]]
        made.patches = [(strength, weights[1], weights[0]) for strength, weights in each]
        self.backup.setdefault(key, Kept(codes, False))
        comfy.utils.set_attr_param(self.model, key, made)
        return None


class Kept(NamedTuple):
    weight: Any
    inplace_update: bool


def write_codes(source: str, target: str) -> None:
    """Writes a file of the pack's format: a line of JSON, and after it the codes."""
    header, pieces, at = [], [], 0
    for name, weight in comfy.utils.load_torch_file(source).items():
        largest = float(weight.float().abs().max()) or 1.0
        plain = weight.ndim < 2 or any(part in name for part in ("emb", "shared", "relative"))
        values = weight.float() if plain else (weight.float() / largest * 127).round().to(torch.int8)
        header.append([name, list(weight.shape), str(values.dtype).removeprefix("torch."), largest, at])
        pieces.append(values.contiguous().view(torch.uint8).numpy().tobytes())
        at += len(pieces[-1])
    text = json.dumps(header).encode()
    with open(target, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(pieces))


def read_codes(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    data = torch.from_file(path, size=os.path.getsize(path), dtype=torch.uint8)[8 + size :]
    for name, shape, dtype, largest, at in header:
        kind = getattr(torch, dtype)
        values = data[at : at + torch.Size(shape).numel() * kind.itemsize].clone().view(kind).view(shape)
        yield name, Codes.of(values, largest) if kind == torch.int8 else values


class PackClip(io.ComfyNode):
    """A CLIP of files that ComfyUI cannot read. `options` is JSON. `kind`: "codes"; "dice": another CLIP in each
    process; "host": it fails in a worker."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestPackClip", category="cp test", is_dev_only=True,
            inputs=[io.String.Input(name) for name in ("files", "type", "options", "kind")],
            outputs=[io.Clip.Output(), io.Custom("PIPE").Output()],
        )  # fmt: skip

    @classmethod
    def execute(cls, files: str, type: str, options: str, kind: str) -> io.NodeOutput:
        if kind == "host" and "RANK" in os.environ:
            raise RuntimeError("only in ComfyUI")
        folders, states = folder_paths.get_folder_paths("text_encoders"), []
        for name in files.split(","):
            state = dict(read_codes(os.path.join(folders[0], name)))
            for key in [key for key in state if kind == "dice" and state[key].ndim < 2]:
                state[key] = state[key] + os.getpid() * 1e-6
            states.append(state)
        clip = comfy.sd.load_text_encoder_state_dicts(
            states, clip_type=comfy.sd.CLIPType[type],
            model_options={**json.loads(options), "custom_operations": CodeOps},
        )  # fmt: skip
        clip.patcher.__class__ = CodePatcher
        return io.NodeOutput(clip, {"more": [1]})


class WriteCodes(io.ComfyNode):
    """Writes text encoders in the format of the pack, each beside its own file."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestWriteCodes", category="cp test", is_dev_only=True, is_output_node=True,
            inputs=[io.String.Input("files")],
        )  # fmt: skip

    @classmethod
    def execute(cls, files: str) -> io.NodeOutput:
        folder = folder_paths.get_folder_paths("text_encoders")[0]
        for name in files.split(","):
            write_codes(os.path.join(folder, f"{name}.safetensors"), os.path.join(folder, f"{name}.codes"))
        return io.NodeOutput()


class FromPipe(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestFromPipe", category="cp test", is_dev_only=True,
            inputs=[io.Custom("PIPE").Input("pipe")], outputs=[io.Model.Output()],
        )  # fmt: skip

    @classmethod
    def execute(cls, pipe: dict[str, Any]) -> io.NodeOutput:
        return io.NodeOutput(pipe["model"])


class Word(io.ComfyNode):
    """A text that another node gets by a link."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CPTestWord", category="cp test", is_dev_only=True,
            inputs=[io.String.Input("text")], outputs=[io.String.Output()],
        )  # fmt: skip

    @classmethod
    def execute(cls, text: str) -> io.NodeOutput:
        return io.NodeOutput(text)


NODES = [PackLoader, PackClip, WriteCodes, FromPipe, Word]
