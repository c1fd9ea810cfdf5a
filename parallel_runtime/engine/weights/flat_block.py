"""The weights of one block as one flat row of bytes: the plain tensors inside a weight of any format, laid out, and the
same weight rebuilt around other tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ALIGNMENT_BYTES = 512  # of every tensor: kernels, and so the bits of a result, are chosen by alignment
CPU_ALIGNMENT_BYTES = 64
PAGE_BYTES = 4096


@dataclass(frozen=True, eq=False)
class FlatTensor:
    """One plain tensor of a parameter: its offset and size [bytes], and a `template` of it without storage."""

    offset: int
    nbytes: int
    template: Tensor

    def view(self, memory: Tensor) -> Tensor:
        return memory[self.offset : self.offset + self.nbytes].view(self.template.dtype).view(self.template.shape)


class FlatBlock:
    """The layout of a block's parameters. `padded_bytes` is a number of pages that `ranks` divides."""

    def __init__(self, block: nn.Module, ranks: int = 1) -> None:
        self._parameters: list[tuple[nn.Module, str, nn.Parameter, list[FlatTensor]]] = []
        self._end = 0
        for module in block.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    tensors = [self._append(plain) for plain in plain_tensors(weight)]
                    empty = rebuild_parameter(weight, [tensor.template for tensor in tensors])
                    self._parameters.append((module, name, empty, tensors))
        self.padded_bytes = -(-self._end // (PAGE_BYTES * ranks)) * PAGE_BYTES * ranks

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the weights, without padding."""
        return sum(tensor.nbytes for tensor in self._tensors())

    @property
    def layout(self) -> str:
        """Returns a text that is equal on ranks with equal layouts."""
        return repr([(x.offset, x.nbytes, str(x.template.dtype), x.template.shape) for x in self._tensors()])

    def write(self, memory: Tensor, first: int = 0, only: tuple[nn.Module, str] | None = None) -> None:
        """Copies the bytes of the parameters from `first` on into `memory`. `only`: of this parameter alone."""
        last = first + memory.numel()
        for module, name, _, tensors in self._parameters:
            if only not in (None, (module, name)):
                continue
            for tensor, plain in zip(tensors, plain_tensors(getattr(module, name)), strict=True):
                begin, end = max(tensor.offset, first), min(tensor.offset + tensor.nbytes, last)
                if begin < end:
                    raw = plain.contiguous().view(-1).view(memory.dtype)
                    memory[begin - first : end - first].copy_(raw[begin - tensor.offset : end - tensor.offset])

    def dtype_matches(self, module: nn.Module, name: str) -> bool:
        """Returns whether this parameter still has the dtype of the layout."""
        (empty,) = (empty for owner, called, empty, _ in self._parameters if owner is module and called == name)
        return empty.dtype == getattr(module, name).dtype

    def drop_storage(self) -> None:
        """Frees the parameters' memory; until `bind` they have dtype and shape alone."""
        for module, name, empty, _ in self._parameters:
            module._parameters[name] = empty

    def bind(self, memory: Tensor) -> None:
        for module, name, empty, tensors in self._parameters:
            module._parameters[name] = rebuild_parameter(empty, [tensor.view(memory) for tensor in tensors])

    def _tensors(self) -> Iterator[FlatTensor]:
        return (tensor for *_, tensors in self._parameters for tensor in tensors)

    def _append(self, plain: Tensor) -> FlatTensor:
        """Adds a tensor; on the CPU at its old offset in a cache line: a file's weights begin anywhere."""
        line_offset = plain.data_ptr() % CPU_ALIGNMENT_BYTES if plain.device.type == "cpu" else 0
        line_offset = 0 if line_offset % plain.element_size() else line_offset
        tensor = FlatTensor(self._end + line_offset, plain.numel() * plain.element_size(), without_storage(plain))
        self._end += -(-(line_offset + tensor.nbytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return tensor


def plain_tensors(weight: Tensor) -> list[Tensor]:
    """Returns a quantised weight's codes and scales; the stored bytes of one whose class shows another shape."""
    if hasattr(weight, "__tensor_flatten__"):
        names, _ = weight.__tensor_flatten__()
        return [getattr(weight, name) for name in names]
    return [weight.detach().as_subclass(Tensor)]


def rebuild_parameter(weight: Tensor, parts: list[Tensor]) -> nn.Parameter:
    """Returns a parameter of `weight`'s class, shape and attributes with the plain tensors `parts`."""
    weight_class: Any = type(weight)
    if hasattr(weight, "__tensor_flatten__"):
        names, context = weight.__tensor_flatten__()
        parameter = weight_class.__tensor_unflatten__(dict(zip(names, parts, strict=True)), context, weight.shape, None)
        parameter._is_param = True  # nn.Parameter would copy the scales
        return parameter
    if weight_class in (Tensor, nn.Parameter):
        return nn.Parameter(parts[0], requires_grad=False)
    parameter = parts[0].as_subclass(weight_class)
    parameter.__dict__.update({**vars(weight), "_is_param": True})
    return parameter


def without_storage(tensor: Tensor) -> Tensor:
    """Returns a tensor of the same dtype, device and shape that shares one element."""
    return torch.zeros((), dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)
