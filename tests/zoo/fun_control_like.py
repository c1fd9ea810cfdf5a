"""MiniMax H3's Fun ControlNet with the habits of ComfyUI's node for it (comfy_extras/nodes_minimax_h3.py, after v0.33):
a model patch with a VAE, in a wrapper around the network and in replaced blocks, whose own blocks attend to all tokens.
None of its code is here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from comfy.patcher_extension import WrappersMP
from torch import Tensor, nn

from .later import WIDTH, DiTBlock
from .tiny import filled

CHANNELS = 4  # of a row of the control


class MiniMaxH3FunControl(nn.Module):
    """`strips`: it takes overrides of attention out of the options of its blocks, as from 0.38 on."""

    def __init__(self, injection_layers: tuple[int, ...], strips: bool) -> None:
        super().__init__()
        self.injection_layers, self.strips = injection_layers, strips
        self.control_proj_in = nn.Linear(CHANNELS, WIDTH)
        self.control_blocks = nn.ModuleList(DiTBlock(False) for _ in injection_layers)
        for block in self.control_blocks:
            block.after_proj = nn.Linear(WIDTH, WIDTH)
        self.control_blocks[0].before_proj = nn.Linear(WIDTH, WIDTH)

    def init_stream(self, h: Tensor, control_latent: Tensor, layout: Any, t_emb: Tensor) -> Tensor:
        rows = torch.zeros(len(layout.img_update), CHANNELS)
        rows[layout.img_update] = control_latent
        stream = h.clone()
        stream[layout.img_pos] = self.control_proj_in(rows)
        return self.control_blocks[0].before_proj(stream).add_(h)

    def step(
        self, index: int, c: Tensor, t_emb: Tensor, mod_segments: Any, rope_freqs: Tensor, transformer_options: Any
    ) -> tuple[Tensor, Tensor]:
        if self.strips:
            name = "optimized_attention_override"
            transformer_options = {key: value for key, value in transformer_options.items() if key != name}
        block = self.control_blocks[index]
        c = block(c, t_emb, mod_segments, rope_freqs, transformer_options=transformer_options)
        return c, block.after_proj(c)


class MiniMaxH3FunControlPatch:
    """`control_video` is [frames, channels, height, width]; its latents are those of one evaluation's size."""

    def __init__(self, model_patch: Any, vae: Any, control_video: Tensor, strength: float) -> None:
        self.model_patch, self.vae, self.control_video, self.strength = model_patch, vae, control_video, strength
        self.control_latent: Tensor | None = None
        self.control_stream: Tensor | None = None
        self.pristine_stream: Tensor | None = None
        self.active = False

    def diffusion_model_wrapper(
        self, executor: Callable[..., Any], x: Tensor, transformer_options: Any = None, **kwargs: Any
    ) -> Any:
        self.active, self.control_stream = True, None
        if self.control_latent is None:
            latent = self.vae.encode(self.control_video.movedim(1, -1))
            self.control_latent = latent[:, :CHANNELS].movedim(1, -1).reshape(-1, CHANNELS)
        try:
            return executor(x, transformer_options=transformer_options, **kwargs)
        finally:
            self.control_stream = self.pristine_stream = None

    def before_block(self, block_index: int, args: dict[str, Any]) -> None:
        if self.active and block_index == self.model_patch.model.injection_layers[0]:
            self.pristine_stream = args["img"].clone()

    def after_block(self, block_index: int, args: dict[str, Any], out: dict[str, Any]) -> dict[str, Any]:
        control = self.model_patch.model
        index = control.injection_layers.index(block_index)
        if index == 0:
            assert self.control_latent is not None
            self.control_stream = control.init_stream(
                self.pristine_stream, self.control_latent, args["layout"], args["t_emb"]
            )
        self.control_stream, skip = control.step(
            index, self.control_stream, args["t_emb"], args["mod_segments"], args["rope_freqs"],
            transformer_options=args["transformer_options"],
        )  # fmt: skip
        skip[args["layout"].audio_pos] = 0
        out["img"].add_(skip, alpha=self.strength)
        return out

    def models(self) -> list[Any]:
        return [self.model_patch]

    def register(self, options: dict[str, Any]) -> None:
        """Puts it into transformer_options."""
        of_kind = options.setdefault("wrappers", {}).setdefault(WrappersMP.DIFFUSION_MODEL, {})
        of_kind.setdefault(None, []).append(self.diffusion_model_wrapper)
        replaced = options.setdefault("patches_replace", {}).setdefault("dit", {})
        for index in self.model_patch.model.injection_layers:
            place = ("double_block", index)
            replaced[place] = MiniMaxH3FunControlBlockPatch(self, index, replaced.get(place))


class MiniMaxH3FunControlBlockPatch:
    def __init__(self, control_patch: MiniMaxH3FunControlPatch, block_index: int, previous: Any) -> None:
        self.control_patch, self.block_index, self.previous = control_patch, block_index, previous

    def __call__(self, args: dict[str, Any], extra_args: dict[str, Any]) -> dict[str, Any]:
        self.control_patch.before_block(self.block_index, args)
        block = extra_args["original_block"]
        out = block(args) if self.previous is None else self.previous(args, extra_args)
        return self.control_patch.after_block(self.block_index, args, out)

    def models(self) -> list[Any]:
        return self.control_patch.models()


def install(module: Any) -> None:
    """Puts these classes into ComfyUI's `module` of the node, as its own."""
    for kind in MiniMaxH3FunControlPatch, MiniMaxH3FunControlBlockPatch:
        kind.__module__ = module.__name__
        setattr(module, kind.__name__, kind)


def fun_control(strips: bool = True) -> nn.Module:
    return filled(MiniMaxH3FunControl((0, 2), strips).eval())
