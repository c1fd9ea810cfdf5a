"""Writes tiny files for Load Model Patch: `python -m tests.comfyui.write_patches FOLDER NETWORKS`, in ComfyUI's python,
with tests/site on PYTHONPATH, so that ComfyUI's classes are as small as the files. Anima is one of the NETWORKS."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..zoo.remade import lllite
from ..zoo.tiny import filled, make, start_comfyui

FUN_LITE = {"n_control_layers": 3, "additional_in_dim": 17, "refiner_control": True}
WAN_DIM = 256  # of the tiny Wan
FLOAT8 = torch.float8_e4m3fn


def main(folder: str, networks: str) -> None:
    start_comfyui()
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
    for name, build in made.items():
        weights = weights_of(build, prefix="feature_embedder." if name == "uso_style" else "")
        if name == "qwen_depth":
            weights = {key: value.flip(0).contiguous() for key, value in weights.items()}
        save_file(weights, Path(folder) / f"{name}.safetensors")
        save_file({key: value.to(FLOAT8) for key, value in weights.items()}, Path(folder) / f"{name}_fp8.safetensors")
    save_file(lllite(192).state_dict(), Path(folder) / "anima_lllite.safetensors")
    network = make("anima")
    tiny = {"cp_tiny": json.dumps({"model": "Anima", "final": network.unet_config})}
    save_file(network.state_dict(), Path(networks) / "anima.safetensors", metadata=tiny)
    pickled = weights_of(made["qwen_canny"], prefix="")
    torch.save({key: value * 0.7 for key, value in pickled.items()}, Path(folder) / "qwen_pickled.pt")
    old = {key: value * 0.6 for key, value in pickled.items()}
    torch.save(old, Path(folder) / "qwen_old.pt", _use_new_zipfile_serialization=False)


def weights_of(build: Any, prefix: str) -> dict[str, torch.Tensor]:
    import comfy.ops

    network = filled(build(device="cpu", dtype=torch.float32, operations=comfy.ops.manual_cast))
    return {prefix + name: value.contiguous() for name, value in network.state_dict().items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
