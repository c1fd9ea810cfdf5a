"""What ComfyUI's nodes, and other code, put onto a UNet: each a function of a ModelPatcher. Runs in ComfyUI's
python."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..zoo import tiny
from ..zoo.unets import SD15

Patch = Callable[[Any], Any]
WIDTHS = (32, 64, 128)  # of the levels with attention


@lru_cache(1)
def model() -> Any:
    """A BaseModel of ComfyUI's around a tiny SD1.5."""
    import comfy.supported_models

    config = comfy.supported_models.SD15(SD15 | {"dtype": torch.float32})
    made = config.get_model({}, device="cpu")
    tiny.filled(made.diffusion_model)
    return made.eval().requires_grad_(False)


def options_of(patch: Patch) -> dict[str, Any]:
    """transformer_options of a MODEL with `patch`, as a sampler has them in its first step."""
    import comfy.model_patcher

    cpu = torch.device("cpu")
    patcher = comfy.model_patcher.ModelPatcher(model(), load_device=cpu, offload_device=cpu)
    patched = patch(patcher)
    options = dict((patched or patcher).model_options["transformer_options"])
    return options | {"sigmas": torch.tensor([14.0]), "cond_or_uncond": [1], "uuids": []}


def node(module: str, kind: str, *values: Any) -> Patch:
    def patch(patcher: Any) -> Any:
        sys.argv[1:] = []
        code = __import__(f"comfy_extras.{module}", fromlist=[kind])
        made = getattr(code, kind).execute(patcher, *values)
        return getattr(made, "result", made)[0]

    return patch


def put(kind: str, patch: Any) -> Patch:
    return lambda patcher: getattr(patcher, f"set_model_{kind}")(patch)


def _by_region(q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Any], mask: Any = None) -> Tensor:
    """As IP-Adapter: a second attention, by a mask of the picture."""
    from comfy.ldm.modules.attention import optimized_attention

    rows, columns = extra["activations_shape"][-2:]
    where = torch.linspace(0, 1, rows)[:, None] * torch.linspace(1, 0, columns)
    more = optimized_attention(q, k[:, :5], v[:, :5], extra["n_heads"])
    out: Tensor = optimized_attention(q, k, v, extra["n_heads"]) + where.flatten()[None, :, None] * more
    return out


def _regions(patcher: Any) -> None:
    for number in (1, 4, 7):
        patcher.set_model_attn2_replace(_by_region, "input", number)


def _layers(make: Callable[[int], nn.Module]) -> dict[int, nn.Module]:
    return {width: tiny.filled(make(width)).eval().requires_grad_(False) for width in WIDTHS}


def _hypernetwork(patcher: Any) -> None:
    layers = _layers(lambda width: nn.Linear(width, width))

    def patch(q: Tensor, k: Tensor, v: Tensor, extra: dict[str, Any]) -> tuple[Tensor, ...]:
        return (q, k + 0.1 * layers[k.shape[2]](k), v) if k.shape[2] in layers else (q, k, v)

    patcher.set_model_attn1_patch(patch)
    patcher.set_model_attn2_patch(patch)


def _gligen(patcher: Any) -> None:
    from comfy.gligen import GatedSelfAttentionDense

    layers = _layers(lambda width: GatedSelfAttentionDense(width, 24, 8, width // 8))
    objects = torch.randn(1, 6, 24, generator=torch.Generator().manual_seed(5))
    patcher.set_model_patch(lambda x, extra: layers[x.shape[2]](x, objects.expand(x.shape[0], -1, -1)), "middle_patch")


def _layer(layer: Any, x: Tensor, emb: Any, context: Any, options: Any, shape: Any, *more: Any) -> Tensor:
    out: Tensor = layer(x - x.mean((2, 3), keepdim=True), output_shape=shape)
    return out


def _upsampled(patcher: Any) -> None:
    from comfy.ldm.modules.diffusionmodules.openaimodel import Upsample

    patcher.set_model_patch((Upsample, _layer), "forward_timestep_embed_patch")


def _centred(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "h": given["h"] - given["h"].mean((2, 3), keepdim=True)}


class EachToken:
    """Patches that say that they compute each token, or pixel, by itself; they count what they have seen."""

    context_parallel = "each token"
    seen = 0

    def __call__(self, x: Tensor, *others: Any) -> Any:
        EachToken.seen += x[0, ..., 0].numel() if x.ndim == 3 else x[0, 0].numel()
        return (x.tanh() * 2, *others[:-1]) if others[:-1] else x.tanh() * 2


def _each_token(patcher: Any) -> None:
    for kind in ("attn1_patch", "attn1_output_patch", "attn2_patch", "output_block_patch"):
        put(kind, EachToken())(patcher)


PATCHES: dict[str, Patch] = {
    "FreeU": node("nodes_freelunch", "FreeU", 1.1, 1.2, 0.9, 0.2),
    "FreeU_V2": node("nodes_freelunch", "FreeU_V2", 1.3, 1.4, 0.9, 0.2),
    "ToMe": node("nodes_tomesd", "TomePatchModel", 0.4),
    "HyperTile": node("nodes_hypertile", "HyperTile", 64, 2, 1, False),
    "Deep Shrink": node("nodes_model_downscale", "PatchModelAddDownscale", 3, 2.0, 0.0, 0.35, True, *["bicubic"] * 2),
    "PAG": lambda patcher: patcher.set_model_attn1_replace(lambda q, k, v, extra, mask=None: v, "middle", 0),
    "SAG": node("nodes_sag", "SelfAttentionGuidance", 0.5, 2.0),  # it looks on here
    "attention by regions": _regions,
    "attn2_patch": put("attn2_patch", lambda q, k, v, extra: (q * extra["activations_shape"][-2] / 30, k, v)),
    "Hypernetwork": _hypernetwork,
    "GLIGEN": _gligen,
    "emb_patch": put("emb_patch", lambda emb, channels, extra: emb * 1.1),
    "middle_block_after_patch": lambda patcher: patcher.set_model_patch(_centred, "middle_block_after_patch"),
    "forward_timestep_embed_patch": _upsampled,
    "each token": _each_token,
}  # fmt: skip


def control(rows: int, columns: int) -> dict[str, Any]:
    """Residuals of a ControlNet for each level of SD1.5, as ComfyUI hands them to the network."""
    levels = [(0, 32)] * 3 + [(1, 32)] + [(1, 64)] * 2 + [(2, 64)] + [(2, 128)] * 2 + [(3, 128)] * 3

    def of(level: int, channels: int) -> Tensor:
        shape = (1, channels, -(-rows // 2**level), -(-columns // 2**level))
        return torch.randn(shape, generator=torch.Generator().manual_seed(level))

    return {"output": [of(*each) for each in levels], "middle": [of(3, 128)], "input": [of(1, 64), None, of(0, 32)]}
