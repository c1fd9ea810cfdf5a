"""A FLUX whose layers multiply in nvfp4, with one token louder than all others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from ..comfyui.write_formats import quantised
from ..zoo.calls import flux as inputs_of_flux
from ..zoo.networks import FLUX
from ..zoo.tiny import make, seed
from .cases import copied, divided_forward, error, forward


def parity(rank: int, world: int, ring: int, ulysses: int, smooth: bool, fused: bool) -> dict[str, float]:
    """How far the divided network is from the plain one, and that from one that multiplies in full precision. `fused`:
    layers are told the activation of their input, as from ComfyUI 0.39 on."""
    from comfy.ldm.flux.model import Flux

    weights = quantised(make("flux").state_dict(), "nvfp4", {}, {})
    if smooth:
        weights["single_blocks.0.linear1.pre_quant_scale"] = torch.linspace(0.5, 2, FLUX["hidden_size"])  # type: ignore[call-overload]
    network, exact = (
        Flux(**FLUX, dtype=torch.float32, device="cpu", operations=operations(full)) for full in (False, True)
    )
    for each in (network, exact):
        each.load_state_dict(copied(weights))
        each.eval()
        for mlp in [mlp for block in each.double_blocks for mlp in (block.img_mlp, block.txt_mlp)] if fused else ():
            mlp[1], mlp[2] = nn.Identity(), Told(mlp[2])
    seed(11)
    inputs = inputs_of_flux()
    inputs["x"][:, :, -1, -1] *= 30
    plain = forward(network, inputs)
    return {
        "error": error(divided_forward(network, inputs, ring, ulysses), plain),
        "rounded": error(forward(exact, inputs), plain),
        "left": float(any("input_scale" in vars(layer) for layer in network.modules())),
    }


def unlike(rank: int, world: int) -> dict[str, float]:
    """The same where rank 1 has a card that multiplies no nvfp4: how far from one network that multiplies in full."""
    from comfy.ldm.flux.model import Flux

    weights = quantised(make("flux").state_dict(), "nvfp4", {}, {})
    network, exact = (
        Flux(**FLUX, dtype=torch.float32, device="cpu", operations=operations(full)) for full in (rank == 1, True)
    )
    for each in (network, exact):
        each.load_state_dict(copied(weights))
        each.eval()
    seed(11)
    inputs = inputs_of_flux()
    before = [getattr(layer, "_full_precision_mm", None) for layer in network.modules()]
    apart = error(divided_forward(network, inputs, 1, world), forward(exact, inputs))
    after = [getattr(layer, "_full_precision_mm", None) for layer in network.modules()]
    return {"error": apart, "kept": float(before == after)}


class Told(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(-x, input_act="negated gelu")


def eager_input_act(x: Tensor, input_act: str | None, act_weight: Any = None, act_eps: float = 0.0) -> Tensor:
    return x if input_act is None else gelu(-x, approximate="tanh")


def operations(full_precision: bool) -> Any:
    """ComfyUI's, for a CPU, which cannot multiply codes: input is quantised as ever, what they mean is multiplied."""
    import comfy.ops

    comfy.ops._eager_input_act = eager_input_act
    theirs = comfy.ops.mixed_precision_ops({}, torch.float32, full_precision)

    class Operations(theirs):  # type: ignore[misc,valid-type]
        class Linear(theirs.Linear):  # type: ignore[misc,name-defined]
            def _forward(self, given: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                return linear(*(getattr(x, "dequantize", lambda x=x: x)() for x in (given, weight)), bias)

            def forward(self, input: Tensor, *args: Any, input_act: str | None = None, **kwargs: Any) -> Tensor:
                out: Tensor = super().forward(eager_input_act(input, input_act), *args, **kwargs)
                return out

    return Operations
