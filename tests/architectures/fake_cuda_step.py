"""One step of ComfyUI's own sampling loop around a tiny FLUX of fake "cuda" tensors, guided, in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..zoo import tiny
from ..zoo.networks import FLUX

tiny.start_comfyui()
import comfy.samplers  # noqa: E402
import comfy.supported_models  # noqa: E402
from comfy.model_base import BaseModel  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402

CARD = torch.device("cuda", 0)


class OnACard(ModelPatcher):
    def get_free_memory(self, device: torch.device) -> int:
        return 60 << 30


def model() -> BaseModel:
    config = comfy.supported_models.Flux(dict(FLUX))
    config.unet_config = FLUX | {"dtype": torch.bfloat16}
    return config.get_model({}, "", device="cpu")


def step(of: BaseModel) -> Tensor:
    """Inside `fake_cuda`."""
    patcher = OnACard(of, CARD, torch.device("cpu"))
    guider = comfy.samplers.CFGGuider(patcher)
    guider.set_cfg(3.0)
    guider.conds = {"positive": [_cond(7)], "negative": [_cond(7)]}
    guider.inner_model, of.current_patcher = of, patcher
    noise, latent = (torch.empty(1, 16, 17, 23, device="cuda") for _ in range(2))
    euler, sigmas = comfy.samplers.sampler_object("euler"), torch.empty(2, device="cuda")
    return guider.inner_sample(noise, latent, CARD, euler, sigmas, None, None, True, 3)


def _cond(tokens: int) -> dict[str, Any]:
    text = {"cross_attn": torch.empty(1, tokens, 96, device="cuda"), "pooled_output": torch.empty(1, 64, device="cuda")}
    return text | {"uuid": tokens, "model_conds": {}}
