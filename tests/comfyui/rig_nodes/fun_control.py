"""A node of a pack that controls MiniMax H3 as the Fun ControlNet of later ComfyUIs does: by a network beside its
blocks, which attends to all tokens, and a video that a VAE encodes as the network is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import comfy.model_management
import comfy.utils
import torch
from comfy.ldm.common_dit import pad_to_patch_size
from comfy.ldm.minimax.model import patchify_video
from comfy.ldm.modules.attention import optimized_attention
from comfy.patcher_extension import WrappersMP
from comfy_api.latest import io
from torch import Tensor

from .schemas import schema

WIDTH, HEADS, COLUMNS = 192, 3, 96  # of the tiny network, and of a row of its patches


class ControlNetwork(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.proj_in, self.qkv = torch.nn.Linear(COLUMNS, WIDTH), torch.nn.Linear(WIDTH, 3 * WIDTH)
            self.after = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.injection_layers = (0, 1)

    def init_stream(self, h: Tensor, latent: Tensor, layout: Any) -> Tensor:
        rows = torch.zeros(len(layout.img_update), COLUMNS)
        rows[layout.img_update] = patchify_video(pad_to_patch_size(latent, (1, 2, 2)))
        stream = h.clone()
        stream[layout.img_pos] += self.proj_in(rows)
        return stream

    def step(self, index: int, stream: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (part[None] for part in self.qkv(stream).chunk(3, 1))
        stream = stream + optimized_attention(q, k, v, HEADS, transformer_options={})[0]
        return stream, self.after[index](stream)


class Control:
    def __init__(self, network: ControlNetwork, vae: Any, video: Tensor) -> None:
        self.network, self.vae, self.video = network, vae, video
        self.latent = self.stream = self.layout = None

    def around(self, executor: Any, x: Any, timestep: Any, context: Any, options: Any, **kwargs: Any) -> Any:
        self.layout, self.stream = kwargs["minimax_payload"]["layout"], None
        if self.latent is None:
            _, _, frames, height, width = x[0].shape
            count, unit = max((frames - 2) // 5, 0) * 17 + 5, self.vae.spacial_compression_encode()
            held = self.video[torch.arange(count).clamp(max=len(self.video) - 1)].movedim(-1, 1)
            fitted = comfy.utils.common_upscale(held, width * unit, height * unit, "bilinear", "center")
            loaded = comfy.model_management.loaded_models(only_currently_used=True)
            self.latent = self.vae.encode(fitted.movedim(1, -1)).float()
            comfy.model_management.load_models_gpu(loaded)
        return executor(x, timestep, context, options, **kwargs)

    def block(self, index: int, args: dict[str, Any], original: Callable[..., Any]) -> dict[str, Any]:
        if index == 0:
            self.stream = self.network.init_stream(args["img"], self.latent, self.layout)
        out = original(args)
        self.stream, skip = self.network.step(index, self.stream)
        skip[self.layout.audio_pos] = 0
        out["img"].add_(skip, alpha=0.3)
        return out


class BlockPatch:
    def __init__(self, control: Control, index: int) -> None:
        self.control, self.index = control, index

    def __call__(self, args: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
        return self.control.block(self.index, args, extra["original_block"])


class H3Control(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        inputs = [io.Model.Input("model"), io.Vae.Input("vae"), io.Image.Input("video")]
        return schema("CPTestH3Control", inputs, io.Model.Output())

    @classmethod
    def execute(cls, model: Any, vae: Any, video: Tensor) -> io.NodeOutput:
        made, network = model.clone(), ControlNetwork()
        control = Control(network, vae, video)
        made.add_wrapper(WrappersMP.DIFFUSION_MODEL, control.around)
        for index in network.injection_layers:
            made.set_model_patch_replace(BlockPatch(control, index), "dit", "double_block", index)
        return io.NodeOutput(made)
