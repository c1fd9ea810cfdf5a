"""The shape of a family: what a checkpoint's shapes tell, where its weights go, and the bridge of one evaluation.

Families import torch only: the host plans with them where diffusers may be missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from .precision import set_eps
from .table import Table

# What diffusers' classes call the width of a text token.
TEXT_WIDTHS = ("joint_attention_dim", "text_dim", "caption_channels", "cap_feat_dim", "text_embed_dim")

Shapes = Mapping[str, tuple[int, ...]]


class Family(ABC):
    """One architecture, read off one checkpoint.

    `conditions` names ComfyUI's model conditions (what `extra_conds` returns) that the bridge honours; a caller
    refuses any other that is not None.  Modules named in
    `float32` keep float32 weights whatever the model computes in. `eps` maps patterns of norm names to ComfyUI's
    epsilon. `patch` is the side of a token in latent pixels, `table` is written on ComfyUI's names. `needs_text`:
    ComfyUI's model cannot evaluate a prompt without tokens.
    """

    name: ClassVar[str]
    transformer: ClassVar[str]  # a class of diffusers
    conditions: ClassVar[frozenset[str]]
    table: Table
    patch: ClassVar[int] = 2
    float32: ClassVar[frozenset[str]] = frozenset()
    eps: ClassVar[Mapping[str, float]] = {}
    needs_text: ClassVar[bool] = True
    heads: int
    layers: int

    @staticmethod
    @abstractmethod
    def matches(shapes: Shapes) -> bool:
        """Is this one of ours? `shapes` as in `Header.shapes`."""

    @abstractmethod
    def __init__(self, shapes: Shapes, hints: Mapping[str, Any]) -> None:
        """`hints` is ComfyUI's unet_config for what shapes cannot tell; {} means the family's defaults."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Constructor arguments of diffusers' class."""

    @property
    def width(self) -> int:
        """Heads x head size."""
        config = self.config()
        return config.get("dim") or config.get("hidden_size") or self.heads * config["attention_head_dim"]

    @property
    def text_width(self) -> int | None:
        """Numbers a text token has, where the checkpoint's shapes say."""
        config = self.config()
        return next((config[name] for name in TEXT_WIDTHS if config.get(name)), None)

    @staticmethod
    def comfy_name(name: str) -> str:
        """A checkpoint's name for a parameter as ComfyUI's model calls it, which is how weight patches name it."""
        return f"{name.removesuffix('.scale')}.weight" if name.endswith(".scale") else name

    def convert(self, name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
        """One checkpoint tensor under diffusers' names, as views where possible; an unknown name is kept as it is."""
        return self.table(self.comfy_name(name), tensor)

    def in_float32(self, parameter: str) -> bool:
        """Does this parameter of the transformer keep float32, whatever the model computes in?"""
        return parameter.rpartition(".")[0] in self.float32

    def prepare(self, transformer: nn.Module) -> None:
        """Bring a loaded transformer's arithmetic in line with ComfyUI's. Once, after the weights are in."""
        set_eps(transformer, self.eps)

    @abstractmethod
    def tokens(self, latent_shape: tuple[int, ...], text_tokens: int) -> dict[str, int]:
        """Stream name to global token count, for a latent [B, C, (T,) H, W]."""

    def check(self, latent_shape: tuple[int, ...], cond: Mapping[str, Any]) -> None:
        """Raises ValueError for a latent [B, C, (T,) H, W] or a condition that `call` has no answer to.

        Asked for each prompt before a worker is; `cond` as in `call`.
        """
        return

    @abstractmethod
    def call(self, transformer: nn.Module, x: Tensor, timestep: Tensor, cond: Mapping[str, Any]) -> Tensor:
        """One evaluation of ComfyUI's `diffusion_model(x, timestep, **cond)`.

        x: noisy latent in model space and dtype, [B, C, (T,) H, W], c_concat's channels included.
        timestep: float32 [B] ([B, T] where ComfyUI gives each frame its own), exactly as ComfyUI passes it.
        cond: the call's keyword arguments, `context` under "c_crossattn". Tensors have batch B or 1.
        Returns ComfyUI's model output, [B, C_out, (T,) H, W]. What `check` refuses must not come here.
        """


def count(shapes: Shapes, blocks: str) -> int:
    """How many blocks a checkpoint has under `blocks`."""
    numbers = {int(name[len(blocks) + 1 :].split(".", 1)[0]) for name in shapes if name.startswith(f"{blocks}.")}
    return max(numbers, default=-1) + 1


def norm_width(shapes: Shapes, norm: str) -> int:
    """The size of a norm whose weight is called `.scale` or `.weight`, 0 where there is none."""
    return next((shapes[name][0] for name in (f"{norm}.scale", f"{norm}.weight") if name in shapes), 0)


def rows(tensor: Tensor, batch: int) -> Tensor:
    """A condition with batch 1 or B as one of batch B, without copying."""
    return tensor if tensor.shape[0] == batch else tensor.expand(batch, *tensor.shape[1:])


def given(guidance: Tensor | None, x: Tensor) -> Tensor:
    """Guidance [B] in the dtype of x; NaN where there is none, which `precision.absent_as_zero` turns into nothing."""
    if guidance is None:
        return x.new_full((x.shape[0],), float("nan"))
    return rows(guidance, x.shape[0])


def axes_of(head_dim: int) -> tuple[int, int, int]:
    """How FLUX-like models share a head among frame, row and column: 16, 56, 56 of 128."""
    return head_dim // 8, head_dim * 7 // 16, head_dim * 7 // 16
