"""Loads text encoders with options that ComfyUI's own nodes do not have, and saves what they made of a prompt."""

from __future__ import annotations

import inspect
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.hooks
import comfy.model_management
import comfy.patcher_extension
import comfy.sd
import folder_paths
import torch
from comfy_api.latest import io
from safetensors.torch import save_file

from .schemas import CATEGORY, schema


def small(load: Callable[..., comfy.sd.CLIP]) -> Callable[..., comfy.sd.CLIP]:
    """A loader of ComfyUI's with the options in CP_TEST_CLIP_OPTIONS, which its nodes do not have."""

    def loading(*args: Any, **kwargs: Any) -> comfy.sd.CLIP:
        call = inspect.signature(load).bind(*args, **kwargs)
        chosen = json.loads(os.environ.get("CP_TEST_CLIP_OPTIONS", "{}"))
        call.arguments["model_options"] = chosen | call.arguments.get("model_options", {})
        return load(*call.args, **call.kwargs)

    return loading


comfy.sd.load_clip = small(comfy.sd.load_clip)
comfy.sd.load_text_encoder_state_dicts = small(comfy.sd.load_text_encoder_state_dicts)


class LoadClip(io.ComfyNode):
    """As Load CLIP; `options` is JSON."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.String.Input("files"), io.String.Input("type"), io.String.Input("options")]
        return schema("CPTestLoadClip", inputs, io.Clip.Output())

    @classmethod
    def execute(cls, files: str, type: str, options: str) -> io.NodeOutput:
        paths = [folder_paths.get_full_path_or_raise("text_encoders", name) for name in files.split(",")]
        clip = comfy.sd.load_clip(
            ckpt_paths=paths,
            embedding_directory=folder_paths.get_folder_paths("embeddings"),
            clip_type=comfy.sd.CLIPType[type],
            model_options=json.loads(options),
        )
        return io.NodeOutput(clip)


class ChangeClip(io.ComfyNode):
    """Does to a CLIP what some packs do: `how` names it."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Clip.Input("clip"), io.String.Input("how")]
        return schema("CPTestChangeClip", inputs, io.Clip.Output())

    @classmethod
    def execute(cls, clip: Any, how: str) -> io.NodeOutput:
        made = clip.clone()
        if how == "nameless":
            made.patcher.cached_patcher_init = None
        elif how == "injected":
            nothing = comfy.patcher_extension.PatcherInjection(lambda _: None, lambda _: None)
            made.patcher.set_injections("a_pack", [nothing])
        else:  # in place, of a matrix
            with torch.no_grad():
                weight = made.patcher.model.clip_l.transformer.text_model.encoder.layers[0].mlp.fc1.weight
                if how == "a column":
                    weight[:, 3] *= 2
                elif how == "all":
                    weight *= 2
                elif how == "a layer":
                    made.patcher.model.clip_l.transformer.text_model.encoder.layers[0].mlp.fc1 = torch.nn.Identity()
        return io.NodeOutput(made)


class Lora(io.ComfyNode):
    """Puts a seeded LoRA of rank 4 on every matrix of attention of a CLIP, of this strength."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Clip.Input("clip"), io.Float.Input("strength"), io.Int.Input("seed")]
        return schema("CPTestClipLora", inputs, io.Clip.Output())

    @classmethod
    def execute(cls, clip: Any, strength: float, seed: int) -> io.NodeOutput:
        weights = lora(clip, seed)
        return io.NodeOutput(comfy.sd.load_lora_for_models(None, clip, weights, 0.0, strength)[1])


class HookedLora(io.ComfyNode):
    """The same LoRA as a hook."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Clip.Input("clip"), io.Float.Input("strength"), io.Int.Input("seed")]
        return schema("CPTestClipHook", inputs, io.Hooks.Output())

    @classmethod
    def execute(cls, clip: Any, strength: float, seed: int) -> io.NodeOutput:
        return io.NodeOutput(comfy.hooks.create_hook_lora(lora(clip, seed), 0.0, strength))


def lora(clip: Any, seed: int) -> dict[str, torch.Tensor]:
    dice, made = torch.Generator().manual_seed(seed), {}
    for name, weight in clip.cond_stage_model.named_parameters():
        key = f"text_encoders.{name.removesuffix('.weight')}"
        if (
            any(part in name for part in ("self_attn", "SelfAttention"))
            and name.endswith(".weight")
            and weight.ndim == 2
        ):
            made[f"{key}.lora_up.weight"] = torch.randn(weight.shape[0], 4, generator=dice) * 0.1
            made[f"{key}.lora_down.weight"] = torch.randn(4, weight.shape[1], generator=dice) * 0.1
    assert made
    return made


class Generate(io.ComfyNode):
    """The tokens that a text encoder generates after a text, or after tokens in JSON, as numbers."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Clip.Input("clip"), io.String.Input("text"), io.Int.Input("length"), io.Int.Input("nonce")]
        return schema("CPTestGenerate", inputs, io.Conditioning.Output())

    @classmethod
    def execute(cls, clip: Any, text: str, length: int, nonce: int) -> io.NodeOutput:
        tokens = json.loads(text) if text.startswith("{") else clip.tokenize(text)
        made = clip.generate(tokens, max_length=length, seed=4)
        return io.NodeOutput([[torch.tensor(made, dtype=torch.float32), {}]])


class EncodeTokens(io.ComfyNode):
    """What a CLIP makes of tokens in JSON."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Clip.Input("clip"), io.String.Input("tokens")]
        return schema("CPTestEncodeTokens", inputs, io.Conditioning.Output())

    @classmethod
    def execute(cls, clip: Any, tokens: str) -> io.NodeOutput:
        return io.NodeOutput(clip.encode_from_tokens_scheduled(json.loads(tokens)))


class NoClip(io.ComfyNode):
    """What a checkpoint without a text encoder gives."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema("CPTestNoClip", [], io.Clip.Output())

    @classmethod
    def execute(cls) -> io.NodeOutput:
        return io.NodeOutput(None)


class Logged(logging.Handler):
    """Counts what ComfyUI has logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


logged = Logged()
logging.getLogger().addHandler(logged)


class UntilLogged(io.ComfyNode):
    """Waits, before other nodes run that take this CLIP, for `seconds`, and until `text` has been logged so many times;
    says so in the log. Without a text it fails. `then` it changes the CLIP in place."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Clip.Input("clip"), io.String.Input("text"), io.Int.Input("times")]
        more = [
            io.Float.Input("seconds", default=0.0, optional=True),
            io.String.Input("then", default="", optional=True),
        ]
        return io.Schema(
            node_id="CPTestUntilLogged", category=CATEGORY, is_dev_only=True, is_output_node=True, inputs=inputs + more
        )

    @classmethod
    def execute(cls, clip: Any, text: str, times: int, seconds: float = 0.0, then: str = "") -> io.NodeOutput:
        if not text:
            raise ValueError("it shall fail")
        time.sleep(seconds)
        deadline = time.monotonic() + 60
        while sum(text in line for line in logged.lines) < times:
            comfy.model_management.throw_exception_if_processing_interrupted()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{text} was not logged {times} times")
            time.sleep(0.02)
        if then:
            ChangeClip.execute(clip, then)
        logging.info("[test] another node has waited")
        return io.NodeOutput()


class Texts(io.ComfyNode):
    """A list of texts, from lines."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema("CPTestTexts", [io.String.Input("lines")], io.String.Output(is_output_list=True))

    @classmethod
    def execute(cls, lines: str) -> io.NodeOutput:
        return io.NodeOutput(lines.splitlines())


class SaveEncoded(io.ComfyNode):
    """Saves every tensor and number of a CONDITIONING, one after another."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Conditioning.Input("conditioning"), io.String.Input("name")]
        return io.Schema(
            node_id="CPTestSaveEncoded", category=CATEGORY, is_dev_only=True, is_output_node=True, inputs=inputs
        )

    @classmethod
    def execute(cls, conditioning: Any, name: str) -> io.NodeOutput:
        parts = [torch.tensor([float(len(conditioning))])]
        for cond, options in conditioning:
            parts += [torch.tensor([float(size) for size in cond.shape]), cond.flatten()]
            for _, value in sorted(options.items()):
                if isinstance(value, torch.Tensor | int | float):
                    parts.append(torch.as_tensor(value).float().flatten())
        path = Path(folder_paths.get_output_directory()) / f"{name}.safetensors"
        save_file({"samples": torch.cat(parts)}, path)
        return io.NodeOutput(ui={"cp_test": [{"path": str(path)}]})


NODES = [LoadClip, ChangeClip, Lora, HookedLora, Generate, EncodeTokens, NoClip, UntilLogged, Texts, SaveEncoded]
