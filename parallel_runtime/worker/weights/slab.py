"""The weights of one block as one row of bytes: the plain tensors inside a weight of any format, laid out, and the same
weight around other ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LINE = 512  # every piece has lines of its own: kernels are chosen by alignment, and so are the bits of a result
CPU_LINE = 64
PAGE = 4096


@dataclass(frozen=True, eq=False)
class Span:
    """One plain tensor of a parameter: where it begins, how many bytes it has, and what it looks like, without any."""

    start: int
    size: int
    like: Tensor

    def view(self, memory: Tensor) -> Tensor:
        return memory[self.start : self.start + self.size].view(self.like.dtype).view(self.like.shape)


class Slab:
    """Laid out by the block's parameters as they are when it is made; `size` is that of pages that `ranks` divide."""

    def __init__(self, block: nn.Module, ranks: int = 1) -> None:
        self._owners: list[tuple[nn.Module, str, nn.Parameter, list[Span]]] = []
        self._end = 0
        for module in block.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    spans = [self._span(piece) for piece in pieces(weight)]
                    shell = around(weight, [span.like for span in spans])
                    self._owners.append((module, name, shell, spans))
        self.size = -(-self._end // (PAGE * ranks)) * PAGE * ranks

    @property
    def nbytes(self) -> int:
        """Of the weights themselves."""
        return sum(span.size for span in self._spans())

    @property
    def layout(self) -> str:
        """The same on ranks that lay out the same."""
        said = [(span.start, span.size, str(span.like.dtype), span.like.shape) for span in self._spans()]
        return hashlib.sha256(repr(said).encode()).hexdigest()

    def write(self, memory: Tensor, first: int = 0, only: tuple[nn.Module, str] | None = None) -> None:
        """The bytes of the parameters from `first` on, as many as `memory` has. `only`: of this one."""
        last = first + memory.numel()
        for module, name, _, spans in self._owners:
            if only not in (None, (module, name)):
                continue
            for span, piece in zip(spans, pieces(getattr(module, name)), strict=True):
                begin, end = max(span.start, first), min(span.start + span.size, last)
                if begin < end:
                    raw = piece.contiguous().view(-1).view(memory.dtype)
                    memory[begin - first : end - first].copy_(raw[begin - span.start : end - span.start])

    def empty(self) -> None:
        """Parameters that look as before, without memory, until `bind`."""
        for module, name, shell, _ in self._owners:
            module._parameters[name] = shell

    def bind(self, memory: Tensor) -> None:
        """Parameters that are views of `memory`, whatever will be in it."""
        for module, name, shell, spans in self._owners:
            module._parameters[name] = around(shell, [span.view(memory) for span in spans])

    def _spans(self) -> Iterator[Span]:
        return (span for *_, spans in self._owners for span in spans)

    def _span(self, piece: Tensor) -> Span:
        """On the CPU as far into a line as it was: there a file's weights begin anywhere."""
        within = piece.data_ptr() % CPU_LINE if piece.device.type == "cpu" else 0
        within = 0 if within % piece.element_size() else within
        span = Span(self._end + within, piece.numel() * piece.element_size(), hollow(piece))
        self._end += -(-(within + span.size) // LINE) * LINE
        return span


def pieces(weight: Tensor) -> list[Tensor]:
    """A quantised weight's codes and scales; the bytes of one that only pretends to have another shape."""
    if hasattr(weight, "__tensor_flatten__"):
        names, _ = weight.__tensor_flatten__()
        return [getattr(weight, name) for name in names]
    return [weight.detach().as_subclass(Tensor)]


def around(weight: Tensor, parts: list[Tensor]) -> nn.Parameter:
    """A parameter of `weight`'s kind, shape and attributes that holds `parts`, as `pieces` gave them."""
    kind: Any = type(weight)
    if hasattr(weight, "__tensor_flatten__"):
        names, context = weight.__tensor_flatten__()
        made = kind.__tensor_unflatten__(dict(zip(names, parts, strict=True)), context, weight.shape, None)
        made._is_param = True  # nn.Parameter would copy the scales
        return made
    if kind in (Tensor, nn.Parameter):
        return nn.Parameter(parts[0], requires_grad=False)
    made = parts[0].as_subclass(kind)
    made.__dict__.update({**vars(weight), "_is_param": True})
    return made


def hollow(piece: Tensor) -> Tensor:
    """What says the same of itself and has no memory."""
    return torch.zeros((), dtype=piece.dtype, device=piece.device).expand(piece.shape)
