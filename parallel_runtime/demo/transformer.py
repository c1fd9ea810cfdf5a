"""The demo's network: diffusers' FLUX without guidance, to and from a checkpoint under the names of BFL and ComfyUI.

Knows no ComfyUI and no parallelism."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad, pixel_shuffle, pixel_unshuffle

EMBED, DOUBLE, SINGLE = "time_text_embed", "transformer_blocks", "single_transformer_blocks"
# A checkpoint's layers as the transformer calls them, of several fused into one the parts in order.
LAYERS: dict[str, tuple[str, ...]] = {
    "img_in": ("x_embedder",),
    "txt_in": ("context_embedder",),
    "time_in.in_layer": (f"{EMBED}.timestep_embedder.linear_1",),
    "time_in.out_layer": (f"{EMBED}.timestep_embedder.linear_2",),
    "vector_in.in_layer": (f"{EMBED}.text_embedder.linear_1",),
    "vector_in.out_layer": (f"{EMBED}.text_embedder.linear_2",),
    "final_layer.linear": ("proj_out",),
    "final_layer.adaLN_modulation.1": ("norm_out.linear",),
    "double_blocks.#.img_mod.lin": (f"{DOUBLE}.#.norm1.linear",),
    "double_blocks.#.txt_mod.lin": (f"{DOUBLE}.#.norm1_context.linear",),
    "double_blocks.#.img_attn.qkv": tuple(f"{DOUBLE}.#.attn.to_{part}" for part in "qkv"),
    "double_blocks.#.txt_attn.qkv": tuple(f"{DOUBLE}.#.attn.add_{part}_proj" for part in "qkv"),
    "double_blocks.#.img_attn.norm.query_norm": (f"{DOUBLE}.#.attn.norm_q",),
    "double_blocks.#.img_attn.norm.key_norm": (f"{DOUBLE}.#.attn.norm_k",),
    "double_blocks.#.txt_attn.norm.query_norm": (f"{DOUBLE}.#.attn.norm_added_q",),
    "double_blocks.#.txt_attn.norm.key_norm": (f"{DOUBLE}.#.attn.norm_added_k",),
    "double_blocks.#.img_attn.proj": (f"{DOUBLE}.#.attn.to_out.0",),
    "double_blocks.#.txt_attn.proj": (f"{DOUBLE}.#.attn.to_add_out",),
    "double_blocks.#.img_mlp.0": (f"{DOUBLE}.#.ff.net.0.proj",),
    "double_blocks.#.img_mlp.2": (f"{DOUBLE}.#.ff.net.2",),
    "double_blocks.#.txt_mlp.0": (f"{DOUBLE}.#.ff_context.net.0.proj",),
    "double_blocks.#.txt_mlp.2": (f"{DOUBLE}.#.ff_context.net.2",),
    "single_blocks.#.modulation.lin": (f"{SINGLE}.#.norm.linear",),
    "single_blocks.#.linear1": (*(f"{SINGLE}.#.attn.to_{part}" for part in "qkv"), f"{SINGLE}.#.proj_mlp"),
    "single_blocks.#.linear2": (f"{SINGLE}.#.proj_out",),
    "single_blocks.#.norm.query_norm": (f"{SINGLE}.#.attn.norm_q",),
    "single_blocks.#.norm.key_norm": (f"{SINGLE}.#.attn.norm_k",),
}
LAST = "final_layer.adaLN_modulation.1."  # of shift and scale the checkpoint has the shift first


def load(path: Path | str, device: torch.device | str = "cpu") -> Any:
    """Returns the transformer in this file, in float32; its sizes follow from the shapes there. On the CPU, parameters
    of a float32 file are views of it."""
    state = load_file(path)
    width, channels = state["img_in.weight"].shape
    head = state["double_blocks.0.img_attn.norm.query_norm.scale"].shape[0]
    with torch.device("meta"):
        transformer: Any = FluxTransformer2DModel(
            patch_size=1,
            in_channels=channels,
            num_layers=sum(key.startswith("double_blocks") and key.endswith("img_mlp.0.bias") for key in state),
            num_single_layers=sum(key.endswith(".linear1.bias") for key in state),
            attention_head_dim=head,
            num_attention_heads=width // head,
            joint_attention_dim=state["txt_in.weight"].shape[1],
            pooled_projection_dim=state["vector_in.in_layer.weight"].shape[1],
            guidance_embeds=False,
            axes_dims_rope=(head // 8, head * 7 // 16, head * 7 // 16),
        )
    sizes = {name: tensor.shape[0] for name, tensor in transformer.state_dict().items()}
    filled = {
        name: part.to(device, torch.float32)
        for key, names in _names(sizes).items()
        for name, part in zip(names, _swap_halves(key, state[key]).split([sizes[name] for name in names]), strict=True)
    }
    transformer.load_state_dict(filled, assign=True)
    for module in transformer.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.eps = torch.finfo(torch.float32).eps  # ComfyUI's; diffusers adds 1e-6
    return transformer.eval().requires_grad_(False)


def to_checkpoint(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns what the file that `load` reads has of a transformer with this state dict."""
    return {key: _swap_halves(key, torch.cat([state[name] for name in names])) for key, names in _names(state).items()}


def evaluate(transformer: Any, x: Tensor, timestep: Tensor, cond: Mapping[str, Tensor]) -> Tensor:
    """Returns what ComfyUI's `diffusion_model(x, timestep, **cond)` does, for x [B, C, H, W], a timestep [B] and
    conditions of batch B or 1. Odd sides wrap around for a whole patch of 2 x 2."""
    batch, _, height, width = x.shape
    padded = pad(x, (0, width % 2, 0, height % 2), mode="circular")
    sides = [side // 2 for side in padded.shape[-2:]]
    text = cond["c_crossattn"].expand(batch, -1, -1)
    out = transformer(
        hidden_states=pixel_unshuffle(padded, 2).flatten(2).mT.contiguous(),
        encoder_hidden_states=text,
        pooled_projections=cond["y"].expand(batch, -1),
        timestep=timestep,
        img_ids=torch.cartesian_prod(*(torch.arange(float(size), device=x.device) for size in (1, *sides))),
        txt_ids=x.new_zeros(text.shape[1], 3),
        return_dict=False,
    )[0]
    return pixel_shuffle(out.mT.unflatten(2, sides), 2)[..., :height, :width]


def _names(transformer: Iterable[str]) -> dict[str, list[str]]:
    """Returns each name in the checkpoint of a transformer with these parameters, with the parameters that it fuses."""
    numbers = sorted({name.split(".")[1] for name in transformer if "blocks." in name})
    every = {
        f"{layer}.{kind}".replace("#", number).replace("_norm.weight", "_norm.scale"): [
            f"{part}.{kind}".replace("#", number) for part in parts
        ]
        for layer, parts in LAYERS.items()
        for number in numbers
        for kind in ("weight", "bias")
    }
    return {key: names for key, names in every.items() if names[0] in transformer}


def _swap_halves(key: str, tensor: Tensor) -> Tensor:
    """Returns the tensor, that of the last modulation with its halves swapped."""
    return torch.cat(tensor.chunk(2)[::-1]) if key.startswith(LAST) else tensor
