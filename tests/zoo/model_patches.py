"""Files for Load Model Patch. Needs tests/site on PYTHONPATH, so that ComfyUI's classes are as small as the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from .files import Weights, save_network, weights_of
from .remade import lllite
from .tiny import filled

FUN_LITE = {"n_control_layers": 3, "additional_in_dim": 17, "refiner_control": True}
WAN_DIM = 256  # of the tiny Wan
FLOAT8 = torch.float8_e4m3fn


def write(models: Path) -> None:
    import comfy_extras.nodes_model_patch as patches
    from comfy.ldm.lumina.controlnet import ZImage_Control
    from comfy.ldm.wan.uni3c import WanUni3CControlnet

    made = {
        "qwen_canny": patches.QwenImageBlockWiseControlNet,
        "qwen_depth": patches.QwenImageBlockWiseControlNet,
        "qwen_inpaint": lambda **how: patches.QwenImageBlockWiseControlNet(additional_in_dim=4, **how),
        "z_image_fun": ZImage_Control,
        "z_image_fun_lite": lambda **how: ZImage_Control(**FUN_LITE, **how),
        "uso_style": patches.SigLIPMultiFeatProjModel,
        "uni3c": lambda **how: WanUni3CControlnet(
            in_channels=36,
            conv_out_dim=32,
            dim=96,
            ffn_dim=64,
            num_layers=2,
            time_embed_dim=WAN_DIM,
            out_proj_dim=WAN_DIM,
            mid_channels=16,
            **how,
        ),
        "infinite_talk": lambda **how: patches.MultiTalkModelPatch(
            intermediate_dim=4, in_dim=240, out_dim=16, **{name: how[name] for name in how if name != "dtype"}
        ),
    }
    folder = models / "model_patches"
    folder.mkdir(exist_ok=True)
    for name, build in made.items():
        weights = _weights(build, "feature_embedder." if name == "uso_style" else "")
        if name == "qwen_depth":
            weights = {key: value.flip(0).contiguous() for key, value in weights.items()}
        save_file(weights, folder / f"{name}.safetensors")
        save_file({key: value.to(FLOAT8) for key, value in weights.items()}, folder / f"{name}_fp8.safetensors")
    save_network("anima", models / "diffusion_models" / "anima.safetensors")
    save_file(lllite(192).state_dict(), folder / "anima_lllite.safetensors")
    pickled = _weights(made["qwen_canny"])
    torch.save({key: value * 0.7 for key, value in pickled.items()}, folder / "qwen_pickled.pt")
    old = {key: value * 0.6 for key, value in pickled.items()}
    torch.save(old, folder / "qwen_old.pt", _use_new_zipfile_serialization=False)


def _weights(build: Any, prefix: str = "") -> Weights:
    import comfy.ops

    return weights_of(filled(build(device="cpu", dtype=torch.float32, operations=comfy.ops.manual_cast)), prefix)
