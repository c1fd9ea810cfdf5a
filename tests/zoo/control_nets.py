"""ControlNets of every class of ComfyUI's, in files, and the networks that they are for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from .files import Weights, save_weights
from .networks import FLUX, POOLED_SD3, SD35_CONTROL
from .tiny import ROWS, build, filled, make, normal, seed

STRONG = ("zero_convs", "middle_block_out", "controlnet_", "control_blocks", "body.")
NARROW = FLUX | dict(
    context_in_dim=128, hidden_size=256, num_heads=2, depth=1, depth_single_blocks=1, axes_dim=[16, 56, 56]
)
OF_THE_OUTPUT = ("out_channels", "transformer_depth_output")
UNETS = ("sd15", "sdxl")


def write(models: Path) -> None:
    networks, nets = models / "diffusion_models" / "control", models / "controlnet"
    nets.mkdir(exist_ok=True)
    _write_unets(networks, nets)
    _write_union(networks, nets)
    _write_flux(nets)
    _write_sd3(networks, nets)
    _write_qwen(nets)
    _write_adapter(nets)


def of_unet(name: str, **more: Any) -> nn.Module:
    """The ControlNet of the same config as this UNet of the table."""
    config = {key: value for key, value in ROWS[name].config.items() if key not in OF_THE_OUTPUT}
    return build("cldm.cldm:ControlNet", **config, **more, hint_channels=3)


def seeded(network: nn.Module, number: int, strength: float = 1.0) -> Weights:
    """The state dict of a network with the weights of this seed; `strength` multiplies what its residuals come from."""
    state = filled(network).state_dict()
    seed(number)
    for name, value in state.items():
        if value.ndim > 1:
            gain = strength if name.startswith(STRONG) else 1.0
            state[name] = normal(*value.shape) * gain / math.sqrt(value[0].numel())
    return {name: value.contiguous() for name, value in state.items()}


def _told(name: str, **more: Any) -> Weights:
    """A tensor that tells the tests' ComfyUI how small a file is: loaders of ControlNets read no metadata."""
    told = {"model": ROWS[name].model, "final": ROWS[name].config | more}
    return {"cp_tiny": torch.tensor([*json.dumps(told).encode()], dtype=torch.uint8)}


def _write_unets(networks: Path, nets: Path) -> None:
    for number, name in enumerate(UNETS):
        save_weights(name, networks / f"{name}.safetensors", seeded(make(name), number))
        told = _told(name)
        for more, other in enumerate(("plain", "other", "pickled", "shuffle")):
            state = seeded(of_unet(name), 10 * (more + 1) + number, 3.0)
            if other == "pickled":
                torch.save({f"control_model.{key}": value for key, value in state.items()} | told,
                           nets / f"{name}_{other}.pth")  # fmt: skip
            else:
                save_file(state | told, nets / f"{name}_{other}.safetensors")
            if other == "other":
                for word, dtype in ("half", torch.float16), ("float8", torch.float8_e4m3fn):
                    rounded = {key: value.to(dtype) for key, value in state.items()}
                    save_file(rounded | told, nets / f"{name}_{word}.safetensors")
                torch.save({"difference": torch.zeros(1)} | told
                           | {f"control_model.{key}": value * 0.1 for key, value in state.items()},
                           nets / f"{name}_difference.pth")  # fmt: skip
        save_file(low_rank_control(seeded(of_unet(name), 40 + number, 3.0)), nets / f"{name}_lora.safetensors")


def _write_union(networks: Path, nets: Path) -> None:
    """SDXL's union, whose code has a fixed width. Real files name their parts otherwise."""
    save_weights("sdxl_wide", networks / "sdxl_wide.safetensors", seeded(make("sdxl_wide"), 90))
    types = {"union_controlnet_num_control_type": 6}
    state = seeded(of_unet("sdxl_wide", **types), 91, 3.0)
    save_file(state | _told("sdxl_wide", **types), nets / "sdxl_union.safetensors")


def low_rank_control(state: Weights) -> Weights:
    """A Control-LoRA of rank 2: its own layers as they are, those of the UNet as pairs."""
    made = {"lora_controlnet": torch.zeros(1)}
    for name, value in state.items():
        own = name.startswith(("zero_convs", "middle_block_out", "input_hint_block"))
        if own or not name.endswith("weight") or value.ndim == 1:
            made[name] = value
        else:
            made[f"{name[:-6]}up"] = normal(value.shape[0], 2) * 0.05
            made[f"{name[:-6]}down"] = normal(2, *value.shape[1:]) * 0.05
    return made


def _write_flux(nets: Path) -> None:
    scales = {".query_norm.weight": ".query_norm.scale", ".key_norm.weight": ".key_norm.scale"}  # as files name them
    state = seeded(build("ldm.flux.controlnet:ControlNetFlux", **NARROW), 50)
    for ours, theirs in scales.items():
        state = {name.replace(ours, theirs): value for name, value in state.items()}
    save_file(state, nets / "flux_xlabs.safetensors")
    latent = {"latent_input": True, "control_latent_channels": 16, "num_union_modes": 4}
    network = build("ldm.flux.controlnet:ControlNetFlux", **NARROW, **latent)
    save_file(_diffusers(seeded(network, 51)), nets / "flux_union.safetensors")
    latent = {"latent_input": True, "control_latent_channels": 17}
    network = build("ldm.flux.controlnet:ControlNetFlux", **NARROW | {"depth_single_blocks": 0}, **latent)
    save_file(_diffusers(seeded(network, 52), single=0), nets / "flux_inpaint.safetensors")


def _diffusers(state: Weights, single: int = 1) -> Weights:
    """NARROW's weights as diffusers names them, q, k and v apart."""
    import comfy.utils

    out: Weights = {}
    for name, ours in comfy.utils.flux_to_diffusers(NARROW | {"depth_single_blocks": single}).items():
        key, *place = [ours] if isinstance(ours, str) else ours
        twice = ("ff.linear_", "ff_context.linear_", "qkv_mlp", "attn.to_out.weight")
        if key in state and len(place) < 2 and not any(part in name for part in twice):
            out[name] = (state[key].narrow(*place[0]) if place and place[0] else state[key]).contiguous()
    for end in "weight", "bias":
        out[f"controlnet_x_embedder.{end}"] = state[f"pos_embed_input.{end}"]
    own = ("controlnet_blocks", "controlnet_single_blocks", "controlnet_mode")
    return out | {name: value for name, value in state.items() if name.startswith(own)}


def _write_sd3(networks: Path, nets: Path) -> None:
    import comfy.utils

    save_weights("sd35", networks / "sd35.safetensors", seeded(make("sd35"), 60))
    config = SD35_CONTROL | dict(adm_in_channels=POOLED_SD3)
    network = build("cldm.dit_embedder:ControlNetEmbedder", double_y_emb=False, **config)
    names = {key[0]: key[1] for key in comfy.utils.MMDIT_MAP_BASIC}
    state = {names.get(name, name): value for name, value in seeded(network, 61).items()}
    state = {name: value for name, value in state.items() if not name.startswith("x_embedder")}  # it takes its MODEL's
    bias = "transformer_blocks.0.adaLN_modulation.1.bias"
    save_file(state | {"control_type": torch.tensor([1.0]), bias: state[bias]}, nets / "sd35_canny.safetensors")


def _write_qwen(nets: Path) -> None:
    union = build("ldm.qwen_image.controlnet:QwenImageControlNetModel", **ROWS["qwen_narrow"].config)
    save_file(seeded(union, 70) | _told("qwen_narrow"), nets / "qwen_union.safetensors")
    sizes = {"inner_dim": 128, "num_attention_heads": 4, "attention_head_dim": 32}
    fun = build("ldm.qwen_image.controlnet:QwenImageFunControlNetModel", **sizes)
    save_file(seeded(fun, 71), nets / "qwen_fun.safetensors")


def _write_adapter(nets: Path) -> None:
    from comfy.t2i_adapter.adapter import Adapter

    adapter = Adapter(cin=192, channels=[32, 64, 128, 128], nums_rb=2, ksize=1, sk=True, use_conv=False)
    save_file(seeded(adapter, 80), nets / "sd15_t2i.safetensors")
