"""Tiny models of ComfyUI's own classes with seeded weights, for sockets that loaders fill from large files."""

from __future__ import annotations

import math
from typing import Any

import comfy.cldm.cldm
import comfy.clip_vision
import comfy.controlnet
import comfy.ldm.flux.controlnet
import comfy.ldm.flux.redux
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.sd
import comfy.sd1_clip
import comfy.sdxl_clip
import comfy.supported_models_base
import comfy.text_encoders.flux
import comfy.text_encoders.sd3_clip
import torch
from comfy_api.latest import io

from .schemas import CATEGORY, schema

CLIPS: dict[str, Any] = {
    "flux": lambda: (comfy.text_encoders.flux.FluxTokenizer, comfy.text_encoders.flux.FluxClipModel),
    "sd1": lambda: (comfy.sd1_clip.SD1Tokenizer, comfy.sd1_clip.SD1ClipModel),
    "sdxl": lambda: (comfy.sdxl_clip.SDXLTokenizer, comfy.sdxl_clip.SDXLClipModel),
    "refiner": lambda: (comfy.sdxl_clip.SDXLTokenizer, comfy.sdxl_clip.SDXLRefinerClipModel),
    "sd3": lambda: (comfy.text_encoders.sd3_clip.SD3Tokenizer, comfy.text_encoders.sd3_clip.sd3_clip(t5=False)),
}
LAYERS = {"num_hidden_layers": 3, "num_attention_heads": 2}


class TinyClip(io.ComfyNode):
    """A text encoder of this `kind` whose text has this `width`, and its pooled output that of `pooled`."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.String.Input("kind"), io.Int.Input("width"), io.Int.Input("pooled")]
        return schema("CPTestClip", inputs, io.Clip.Output())

    @classmethod
    def execute(cls, kind: str, width: int, pooled: int) -> io.NodeOutput:
        tokenizer, encoder = CLIPS[kind]()
        large = {"sd1": 0, "sdxl": pooled, "sd3": pooled // 2}.get(kind, width)  # the width of CLIP-G, and CLIP-L's
        small = {"sdxl": width - large, "sd3": pooled - large}.get(kind, pooled)
        options = {
            "clip_l_model_config": {**LAYERS, "hidden_size": small, "intermediate_size": 64},
            "clip_g_model_config": {**LAYERS, "hidden_size": large, "intermediate_size": 64},
            "t5xxl_model_config": {"d_model": width, "d_ff": 64, "d_kv": 16, "num_heads": 2, "num_layers": 2},
        }
        target = comfy.supported_models_base.ClipTarget(tokenizer, encoder)
        clip = comfy.sd.CLIP(target, model_options=options)
        _fill(clip.cond_stage_model)
        return io.NodeOutput(clip)


class TinyClipVision(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Int.Input("width"), io.Int.Input("projected"), io.Int.Input("size")]
        return schema("CPTestClipVision", inputs, io.ClipVision.Output())

    @classmethod
    def execute(cls, width: int, projected: int, size: int) -> io.NodeOutput:
        config = {
            **LAYERS, "hidden_size": width, "intermediate_size": 64, "image_size": size, "patch_size": 14,
            "projection_dim": projected, "num_channels": 3, "hidden_act": "gelu", "layer_norm_eps": 1e-5,
            "model_type": "clip_vision_model",
        }  # fmt: skip
        encoder = comfy.clip_vision.ClipVisionModel(config)
        _fill(encoder.model)
        return io.NodeOutput(encoder)


class TinyControlNet(io.ComfyNode):
    """A ControlNet of the MODEL's network: FLUX's by XLabs, which takes pixels, or a UNet's."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema("CPTestControlNet", [io.Model.Input("model")], io.ControlNet.Output())

    @classmethod
    def execute(cls, model: comfy.model_patcher.ModelPatcher) -> io.NodeOutput:
        config = {key: value for key, value in model.model.model_config.unet_config.items() if key != "dtype"}
        where = {"dtype": torch.float32, "device": "cpu", "operations": comfy.ops.disable_weight_init}
        device = comfy.model_management.get_torch_device()
        if "image_model" in config:
            network = comfy.ldm.flux.controlnet.ControlNetFlux(**config, **where)
            made = comfy.controlnet.ControlNet(network, load_device=device, extra_conds=["y", "guidance"])
        else:
            config = {key: value for key, value in config.items() if key not in ("out_channels", *TEMPORAL)}
            network = comfy.cldm.cldm.ControlNet(**config, hint_channels=3, **where)
            made = comfy.controlnet.ControlNet(network, load_device=device)
        _fill(network, scale=0.1)
        return io.NodeOutput(made)


TEMPORAL = ("transformer_depth_output", "use_temporal_attention", "use_temporal_resblock")


class TinyStyleModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Int.Input("seen"), io.Int.Input("width")]
        return schema("CPTestStyleModel", inputs, io.StyleModel.Output())

    @classmethod
    def execute(cls, seen: int, width: int) -> io.NodeOutput:
        network = comfy.ldm.flux.redux.ReduxImageEncoder(seen, width, dtype=torch.float32)
        _fill(network)
        return io.NodeOutput(comfy.sd.StyleModel(network))


class Sound(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Float.Input("seconds"), io.Int.Input("rate"), io.Int.Input("seed")]
        return schema("CPTestSound", inputs, io.Audio.Output())

    @classmethod
    def execute(cls, seconds: float, rate: int, seed: int) -> io.NodeOutput:
        dice = torch.Generator().manual_seed(seed)
        return io.NodeOutput({"waveform": torch.randn(1, 2, int(seconds * rate), generator=dice), "sample_rate": rate})


class TrainedLora(io.ComfyNode):
    """What Train LoRA hands on: the weights themselves, for the weight `key` of the network, a square of `width`."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.String.Input("key"), io.Int.Input("width")]
        return io.Schema(
            node_id="CPTestTrainedLora",
            category=CATEGORY,
            is_dev_only=True,
            inputs=inputs,
            outputs=[io.Custom("LORA_MODEL").Output()],
        )

    @classmethod
    def execute(cls, key: str, width: int) -> io.NodeOutput:
        dice = torch.Generator().manual_seed(6)
        name = f"diffusion_model.{key}"
        down, up = torch.randn(4, width, generator=dice) * 0.1, torch.randn(width, 4, generator=dice) * 0.1
        return io.NodeOutput({f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up})


def _fill(network: torch.nn.Module, scale: float = 1.0) -> None:
    """Values with which activations neither grow nor die; `scale` is that of what is more than a vector."""
    dice = torch.Generator().manual_seed(9)
    for name, weight in network.named_parameters():
        value = torch.randn(weight.shape, generator=dice)
        wide = weight.ndim > 1
        value *= scale / math.sqrt(weight[0].numel()) if wide else 0.1
        weight.data = (value + (1 if not wide and "norm" in name and name.endswith("weight") else 0)).to(weight.dtype)
        weight.requires_grad_(False)


NODES = [TinyClip, TinyClipVision, TinyControlNet, TinyStyleModel, Sound, TrainedLora]
