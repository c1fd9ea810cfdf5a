"""Writes tiny ControlNets of every class of ComfyUI's, and the networks that they are for, into a folder of models:
`python -m tests.comfyui.write_control_nets MODELS`, in ComfyUI's python."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ..zoo.tiny import build, filled, normal, seed, start_comfyui
from .write_unets import POOLED, SHAPE, SIZES, seen

POOLED_SD3 = 2048  # ComfyUI's loader writes it into SD3.5's ControlNets
STRONG = ("zero_convs", "middle_block_out", "controlnet_", "control_blocks", "body.")
FLUX: dict[str, Any] = {
    "image_model": "flux", "in_channels": 16, "out_channels": 16, "vec_in_dim": 64, "context_in_dim": 128,
    "hidden_size": 256, "mlp_ratio": 4.0, "num_heads": 2, "depth": 1, "depth_single_blocks": 1,
    "axes_dim": [16, 56, 56], "theta": 10000, "patch_size": 2, "qkv_bias": True, "guidance_embed": True,
    "txt_ids_dims": [],
}  # fmt: skip
QWEN: dict[str, Any] = {
    "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 32, "joint_attention_dim": 96,
    "axes_dims_rope": [8, 12, 12],
}  # fmt: skip
UNETS: dict[str, tuple[str, dict[str, Any]]] = {"sd15": ("SD15", {}), "sdxl": ("SDXL", seen(POOLED + SIZES))}


def main(directory: str) -> None:
    start_comfyui()
    models = Path(directory)
    networks, nets = models / "diffusion_models" / "control", models / "controlnet"
    for folder in networks, nets:
        folder.mkdir(exist_ok=True)
    _write_unets(networks, nets)
    _write_union(networks, nets)
    _write_flux(nets)
    _write_sd3(networks, nets)
    _write_qwen(nets)
    _write_adapter(nets)


def weights_of(network: nn.Module, number: int, strength: float = 1.0) -> dict[str, Tensor]:
    """The state dict of a network with the weights of this seed; `strength` multiplies what its residuals come from."""
    state = filled(network).state_dict()
    seed(number)
    for name, value in state.items():
        if value.ndim > 1:
            gain = strength if name.startswith(STRONG) else 1.0
            state[name] = normal(*value.shape) * gain / math.sqrt(value[0].numel())
    return {name: value.contiguous() for name, value in state.items()}


def told(kind: str, config: dict[str, Any]) -> dict[str, Tensor]:
    """A tensor that tells the tests' ComfyUI how small a file is: loaders of ControlNets read no metadata."""
    return {"cp_tiny": torch.tensor([*json.dumps({"model": kind, "final": config}).encode()], dtype=torch.uint8)}


def _control(path: str, **config: Any) -> nn.Module:
    import importlib

    import comfy.ops

    module, name = path.split(":")
    kind = getattr(importlib.import_module(f"comfy.{module}"), name)
    made: nn.Module = kind(**config, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init)
    return made


def _write_unets(networks: Path, nets: Path) -> None:
    for number, (name, (kind, changes)) in enumerate(UNETS.items()):
        config = SHAPE | changes
        network = build("ldm.modules.diffusionmodules.openaimodel:UNetModel", **config)
        metadata = {"cp_tiny": json.dumps({"model": kind, "final": config})}
        save_file(weights_of(network, number), networks / f"{name}.safetensors", metadata=metadata)
        short = {key: value for key, value in config.items() if key not in ("out_channels", "transformer_depth_output")}
        for more, other in enumerate(("plain", "other", "pickled", "shuffle")):
            network = _control("cldm.cldm:ControlNet", **short, hint_channels=3)
            state = weights_of(network, 10 * (more + 1) + number, 3.0)
            if other == "pickled":
                torch.save({f"control_model.{key}": value for key, value in state.items()} | told(kind, config),
                           nets / f"{name}_{other}.pth")  # fmt: skip
            else:
                save_file(state | told(kind, config), nets / f"{name}_{other}.safetensors")
            if other == "other":
                for word, dtype in ("half", torch.float16), ("float8", torch.float8_e4m3fn):
                    rounded = {key: value.to(dtype) for key, value in state.items()}
                    save_file(rounded | told(kind, config), nets / f"{name}_{word}.safetensors")
                torch.save({"difference": torch.zeros(1)} | told(kind, config)
                           | {f"control_model.{key}": value * 0.1 for key, value in state.items()},
                           nets / f"{name}_difference.pth")  # fmt: skip
        save_file(_lora(weights_of(network, 40 + number, 3.0)), nets / f"{name}_lora.safetensors")


def _write_union(networks: Path, nets: Path) -> None:
    """SDXL's union, whose code has a fixed width. Real files name their parts otherwise."""
    config = SHAPE | UNETS["sdxl"][1] | {"model_channels": 320, "channel_mult": (1, 1), "num_res_blocks": [1, 1]}
    network = build("ldm.modules.diffusionmodules.openaimodel:UNetModel", **config)
    metadata = {"cp_tiny": json.dumps({"model": "SDXL", "final": config})}
    save_file(weights_of(network, 90), networks / "sdxl_wide.safetensors", metadata=metadata)
    short = {key: value for key, value in config.items() if key not in ("out_channels", "transformer_depth_output")}
    types = {"union_controlnet_num_control_type": 6}
    state = weights_of(_control("cldm.cldm:ControlNet", **short, **types, hint_channels=3), 91, 3.0)
    save_file(state | told("SDXL", config | types), nets / "sdxl_union.safetensors")


def _lora(state: dict[str, Tensor]) -> dict[str, Tensor]:
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
    state = weights_of(_control("ldm.flux.controlnet:ControlNetFlux", **FLUX), 50)
    for ours, theirs in scales.items():
        state = {name.replace(ours, theirs): value for name, value in state.items()}
    save_file(state, nets / "flux_xlabs.safetensors")
    latent = {"latent_input": True, "control_latent_channels": 16, "num_union_modes": 4}
    network = _control("ldm.flux.controlnet:ControlNetFlux", **FLUX, **latent)
    save_file(_diffusers(weights_of(network, 51)), nets / "flux_union.safetensors")
    latent = {"latent_input": True, "control_latent_channels": 17}
    network = _control("ldm.flux.controlnet:ControlNetFlux", **FLUX | {"depth_single_blocks": 0}, **latent)
    save_file(_diffusers(weights_of(network, 52), single=0), nets / "flux_inpaint.safetensors")


def _diffusers(state: dict[str, Tensor], single: int = 1) -> dict[str, Tensor]:
    """FLUX's weights as diffusers names them, q, k and v apart."""
    import comfy.utils

    out: dict[str, Tensor] = {}
    for name, ours in comfy.utils.flux_to_diffusers(FLUX | {"depth_single_blocks": single}).items():
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

    context = {"target": "torch.nn.Linear", "params": {"in_features": 96, "out_features": 192}}
    network = build(
        "ldm.modules.diffusionmodules.mmdit:OpenAISignatureMMDITWrapper", input_size=None, patch_size=2, in_channels=16,
        depth=3, adm_in_channels=POOLED_SD3, num_patches=32 * 32, pos_embed_max_size=32, qk_norm="rms",
        context_embedder_config=context, x_block_self_attn_layers=[],
    )  # fmt: skip
    metadata = {"cp_tiny": json.dumps({"model": "SD3", "final": network.unet_config})}
    save_file(weights_of(network, 60), networks / "sd35.safetensors", metadata=metadata)
    sizes = {"in_chans": 16, "attention_head_dim": 64, "num_attention_heads": 3, "adm_in_channels": POOLED_SD3}
    network = _control(
        "cldm.dit_embedder:ControlNetEmbedder", img_size=None, patch_size=2, num_layers=2, main_model_double=3,
        double_y_emb=False, **sizes,
    )  # fmt: skip
    names = {key[0]: key[1] for key in comfy.utils.MMDIT_MAP_BASIC}
    state = {names.get(name, name): value for name, value in weights_of(network, 61).items()}
    state = {name: value for name, value in state.items() if not name.startswith("x_embedder")}  # it takes its MODEL's
    bias = "transformer_blocks.0.adaLN_modulation.1.bias"
    save_file(state | {"control_type": torch.tensor([1.0]), bias: state[bias]}, nets / "sd35_canny.safetensors")


def _write_qwen(nets: Path) -> None:
    union = _control("ldm.qwen_image.controlnet:QwenImageControlNetModel", **QWEN)
    save_file(weights_of(union, 70) | told("QwenImage", QWEN), nets / "qwen_union.safetensors")
    sizes = {"inner_dim": 128, "num_attention_heads": 4, "attention_head_dim": 32}
    fun = _control("ldm.qwen_image.controlnet:QwenImageFunControlNetModel", **sizes)
    save_file(weights_of(fun, 71), nets / "qwen_fun.safetensors")


def _write_adapter(nets: Path) -> None:
    from comfy.t2i_adapter.adapter import Adapter

    adapter = Adapter(cin=192, channels=[32, 64, 128, 128], nums_rb=2, ksize=1, sk=True, use_conv=False)
    save_file(weights_of(adapter, 80), nets / "sd15_t2i.safetensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
