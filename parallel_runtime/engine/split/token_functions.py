"""Functions of torch that read other ranks' tokens without attention: sums over tokens, and convolutions along them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...architectures.split_plan import TokenFunction
from ...errors import Unsplittable
from ..comm.collectives import all_gather_v
from ..comm.mesh import MeshDim
from .streams import Streams


def with_all_tokens(
    forward: Callable[..., Any], function: TokenFunction, stream: str, streams: Streams, ranks: MeshDim
) -> Callable[..., Any]:
    """Returns a module's forward whose `function` takes this rank's tokens of `stream` and all others into account."""

    @torch.compiler.disable
    def run(*args: Any, **kwargs: Any) -> Any:
        with _Mode(function, streams.sizes(stream), ranks):
            return forward(*args, **kwargs)

    return run


class _Mode(TorchFunctionMode):
    """Handles the first call of a function: `sizes` are the tokens of each rank."""

    def __init__(self, function: TokenFunction, sizes: tuple[int, ...], ranks: MeshDim) -> None:
        super().__init__()
        self._function: Any = F.conv1d if function == "convolution" else torch.matmul
        self._handler: Callable[..., Tensor] = _convolution if function == "convolution" else _sum
        self._sizes, self._ranks, self._done = sizes, ranks, False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not self._function or self._done:
            return func(*args, **(kwargs or {}))
        self._done = True
        return self._handler(self._sizes, self._ranks, *args, **(kwargs or {}))


def _sum(sizes: tuple[int, ...], ranks: MeshDim, first: Tensor, second: Tensor) -> Tensor:
    """Returns the product of [..., M, local tokens] and [..., local tokens, N], summed over all ranks."""
    product = torch.matmul(first, second)
    if not sizes[ranks.index]:  # of a dummy token
        product = torch.zeros_like(product)
    (products,) = all_gather_v(product[None], [1] * ranks.size, ranks).wait()
    return products.sum(0)


def _convolution(
    sizes: tuple[int, ...],
    ranks: MeshDim,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    """Computes torch.nn.functional.conv1d of [batch, channels, local tokens] with the tokens next to them."""
    shape = [value if isinstance(value, int) else next(iter(value)) for value in (stride, padding, dilation)]
    if shape != [1, 1, 1] or weight.shape[2] != 3:
        raise Unsplittable(f"a convolution with padding {padding} of a kernel of {weight.shape[2]}")
    edges = torch.stack([x[..., :1], x[..., -1:]])[None]
    (by_rank,) = all_gather_v(edges, [1] * ranks.size, ranks).wait()
    outside, others = torch.zeros_like(x[..., :1]), [rank for rank, size in enumerate(sizes) if size]
    before = [by_rank[rank, 1] for rank in others if rank < ranks.index] or [outside]
    after = [by_rank[rank, 0] for rank in others if rank > ranks.index] or [outside]
    return F.conv1d(torch.cat([before[-1], x, after[0]], 2), weight, bias, 1, 0, 1, groups)
