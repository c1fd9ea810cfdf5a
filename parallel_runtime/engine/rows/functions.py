"""This rank's rows (dim -2; or columns, -1) of every activation, and torch's functions on them: with the neighbours'
rows, which travel while the inside is computed; with all ranks' statistics or keys; on these rows alone; or refused."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ...errors import Unsplittable
from ..attention.dispatch import attend_block
from ..attention.ring_and_ulysses import Merge, rotate
from ..comm.collectives import all_gather_v, allocate, send_recv
from ..comm.mesh import MeshDim

Rows = tuple[int, ...]  # of each rank
Handlers = dict[Any, Callable[..., Any]]  # by function: called with a Share, the function and its arguments
NeighbourRows = Callable[[], tuple[Tensor | None, Tensor | None]]
PIECE_ELEMENTS = 2**22  # 16 MiB in float32, which stay in a GPU's cache
WIDE = (torch.float32, torch.float64)

Size = int | Sequence[int]
Given = Tensor | None  # None where a function is called without it
Function = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Share:
    """Rank i of `ranks` has `units[i]` rows of the latent, and f times as many of a level that is f times as fine."""

    ranks: MeshDim
    dim: int
    units: tuple[int, ...]
    _weights: dict[tuple[Rows, torch.device], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.dim in (-2, -1)
        assert len(self.units) == self.ranks.size
        assert min(self.units) >= 1, "a rank without rows: use fewer ranks"

    @property
    def index(self) -> int:
        return self.ranks.index

    @property
    def local_units(self) -> int:
        return self.units[self.index]

    def is_level(self, x: Tensor) -> bool:
        """Returns whether `x` can be this rank's rows of some level."""
        return x.shape[self.dim] % self.local_units == 0

    def rows_of(self, x: Tensor, what: str) -> Rows:
        """Returns the rows of each rank at the level of `x`. Raises Refused where `x` cannot be this rank's rows."""
        factor, left = divmod(x.shape[self.dim], self.local_units)
        if left:
            raise Unsplittable(f"{what} of {tuple(x.shape)}: dim {self.dim} is no multiple of {self.local_units} rows")
        return tuple(units * factor for units in self.units)

    def full_of(self, x: Tensor) -> Tensor | None:
        """Returns the picture of which `x` is this rank's rows, if every rank has all of it."""
        return None

    def split(self, x: Tensor) -> Tensor:
        """Returns this rank's rows of a full tensor of any level."""
        factor = x.shape[self.dim] // sum(self.units)
        return x.narrow(self.dim, sum(self.units[: self.index]) * factor, self.local_units * factor)

    def gather(self, x: Tensor) -> Tensor:
        """Returns the full tensor of all ranks' rows. Collective."""
        return all_gather_v(x, self.rows_of(x, "a gather"), self.ranks, self.dim)

    def weights(self, x: Tensor) -> Tensor:
        """Returns each rank's share of all rows of `x`, which lie flat in 3 dims: float32, the weights of a mean."""
        key = rows, _ = (self.rows_of(x, "a group norm") if x.ndim > 3 else self.units), x.device
        if key not in self._weights:
            self._weights[key] = torch.tensor([each / sum(rows) for each in rows], device=x.device)
        return self._weights[key]


def fetch_neighbour_rows(share: Share, x: Tensor, before: int, after: int) -> NeighbourRows:
    """Starts to fetch `before` and `after` rows next to this rank's, no more than any rank has. The result waits for
    them, and is None at an outer edge and where none were asked for. Collective."""
    rows, ranks = x.shape[share.dim], range(share.ranks.size)
    send: dict[int, Tensor] = {}
    receive: dict[int, list[int]] = {}
    sides = ((share.index - 1, 0, after, before), (share.index + 1, rows - before, before, after))
    for peer, start, sent_rows, received_rows in sides:
        if peer in ranks and sent_rows:
            send[peer] = x.narrow(share.dim, start, sent_rows)
        if peer in ranks and received_rows:
            receive[peer] = list(x.shape)
            receive[peer][share.dim] = received_rows
    if not send and not receive:
        return lambda: (None, None)
    # Every rank has the whole latent: its rows need not travel.
    if (full := share.full_of(x)) is not None:
        first = sum(share.rows_of(x, "rows")[: share.index])
        ranges = {share.index - 1: (first - before, before), share.index + 1: (first + rows, after)}
        edges = {peer: full.narrow(share.dim, *ranges[peer]) for peer in receive}
        return lambda: (edges.get(share.index - 1), edges.get(share.index + 1))
    buffers = {peer: allocate(shape, x) for peer, shape in receive.items()}
    pending = send_recv(send, buffers, share.ranks)

    def wait() -> tuple[Tensor | None, Tensor | None]:
        pending.wait()
        return buffers.get(share.index - 1), buffers.get(share.index + 1)

    return wait


class RowFunctions(TorchFunctionMode):
    """Functions with one of `handlers` treat a tensor as this rank's rows of a larger one in this mode. `tick` is
    called before each of them: equally often, in the same places, on every rank."""

    def __init__(self, share: Share, handlers: Handlers, tick: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._share = share
        self._handlers = handlers
        self._tick = tick

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = self._handlers.get(func)
        if handler is None:
            return func(*args, **(kwargs or {}))
        self._tick()
        return handler(self._share, func, *args, **(kwargs or {}))


def convolution(
    share: Share, func: Function, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Size = 1,
    padding: Any = 0, dilation: Size = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Computes torch.nn.functional.conv2d or conv3d."""
    dim, dims = share.dim, weight.ndim - 2
    if isinstance(padding, str):
        raise Unsplittable(f"a convolution with padding {padding!r}")
    stride, padding, dilation = (_per_dim(size, dims) for size in (stride, padding, dilation))
    run = partial(func, weight=weight, bias=bias, stride=stride, dilation=dilation, groups=groups)
    halo, reach = padding[dim], (weight.shape[dim] - 1) * dilation[dim]
    if halo == 0:  # what it needs was padded before, or it needs nothing
        y = run(x, padding=padding)
        return y if weight.shape[dim] == stride[dim] == 1 else _check_level(share, y, x, weight, stride, padding)
    across = list(padding)
    across[dim] = 0
    run_edge = partial(run, padding=tuple(across))
    if stride[dim] > 1 or x.shape[dim] < 2 * reach or halo > min(share.rows_of(x, "padding")):
        # An output row at one edge may need the other's halo, or one from afar, or rows are skipped.
        y = run_edge(pad(share, F.pad, x, [*[0, 0] * (-1 - dim), halo, halo]))
        return _check_level(share, y, x, weight, stride, padding)
    neighbour_rows = fetch_neighbour_rows(share, x, halo, halo)
    # With zeros for the neighbours' rows while these travel, and the rows at inner edges again: so no activation is
    # copied for its halo.
    y = run(x, padding=padding)
    top, bottom = neighbour_rows()
    if top is not None:
        y.narrow(dim, 0, halo).copy_(run_edge(torch.cat([top, x.narrow(dim, 0, reach)], dim)))
    if bottom is not None:
        edge = torch.cat([x.narrow(dim, x.shape[dim] - reach, reach), bottom], dim)
        y.narrow(dim, y.shape[dim] - halo, halo).copy_(run_edge(edge))
    return _check_level(share, y, x, weight, stride, padding)


def convolution_with_edges(
    share: Share, func: Function, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Size, padding: Any, *more: Any
) -> Tensor:
    """Computes conv2d or conv3d of rows with one more row at each side, which serves as padding."""
    remaining_padding = list(_per_dim(padding, weight.ndim - 2))
    remaining_padding[share.dim] = max(0, remaining_padding[share.dim] - 1)
    y = func(x, weight, bias, stride, tuple(remaining_padding), *more)
    return _check_level(share, y, x, weight, stride, padding)


def _check_level(share: Share, y: Tensor, x: Tensor, weight: Tensor, stride: Size, padding: Any) -> Tensor:
    """Returns `y`, the convolution of `x`. Raises Refused where it is not the rows of a level."""
    if not share.is_level(y):
        detail = f"a convolution {tuple(weight.shape)} with stride {stride} and padding {padding}"
        raise Unsplittable(f"{detail} of {tuple(x.shape)} makes {tuple(y.shape)}")
    return y


def cudnn_convolution(
    share: Share, func: Function, x: Tensor, weight: Tensor, padding: Size, stride: Size, dilation: Size, groups: int,
    **flags: Any,
) -> Tensor:  # fmt: skip
    """Computes torch.cudnn_convolution, which ComfyUI calls for 3D convolutions on some versions of cuDNN."""

    def plain(
        x: Tensor, weight: Tensor, bias: None, stride: Size, padding: Size, dilation: Size, groups: int
    ) -> Tensor:
        return func(x, weight, padding, stride, dilation, groups, **flags)

    return convolution(share, plain, x, weight, None, stride, padding, dilation, groups)


def transposed(
    share: Share, func: Function, x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Size = 1,
    padding: Size = 0, output_padding: Size = 0, groups: int = 1, dilation: Size = 1,
) -> Tensor:  # fmt: skip
    """Computes torch.nn.functional.conv_transpose2d or 3d, where no output row comes from two input rows."""
    dims = weight.ndim - 2
    steps, pads, more, dilated = (_per_dim(s, dims)[share.dim] for s in (stride, padding, output_padding, dilation))
    if weight.shape[share.dim] != steps or pads or more or dilated != 1:
        raise Unsplittable(f"a transposed convolution {tuple(weight.shape)} with stride {stride} and padding {padding}")
    return func(x, weight, bias, stride, padding, output_padding, groups, dilation)


def _per_dim(size: Size, dims: int) -> tuple[int, ...]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return sizes * dims if len(sizes) == 1 else sizes


def pad(
    share: Share, func: Function, x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Tensor:
    """Computes torch.nn.functional.pad: along the split dim the neighbour's rows; at the outer edges as given."""
    at = 2 * (-1 - share.dim)
    before, after = (pad[at], pad[at + 1]) if len(pad) > at + 1 else (0, 0)
    if before == after == 0:
        return func(x, pad, mode, value)
    if min(before, after) < 0 or mode == "circular":
        raise Unsplittable(f"padding {tuple(pad)} ({mode}) of {tuple(x.shape)} along the split dim")
    rows = share.rows_of(x, "padding")
    if max(before, after) + (mode == "reflect") > min(rows):  # some rows are further than the next rank
        y = func(share.gather(x), pad, mode, value)
        return y.narrow(share.dim, sum(rows[: share.index]), rows[share.index] + before + after).contiguous()
    neighbour_rows = fetch_neighbour_rows(share, x, before, after)
    across = [*pad]
    across[at] = across[at + 1] = 0
    y = func(x, pad, mode, value)
    top, bottom = neighbour_rows()
    if top is not None:
        y.narrow(share.dim, 0, before).copy_(func(top, across, mode, value))
    if bottom is not None:
        y.narrow(share.dim, y.shape[share.dim] - after, after).copy_(func(bottom, across, mode, value))
    return y


def group_norm(
    share: Share, func: Function, x: Tensor, num_groups: int, weight: Given = None, bias: Given = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Computes torch.nn.functional.group_norm with the statistics of all ranks, in float32 whatever `x` is in."""
    weights = share.weights(x)
    moments = all_gather_v(_moments(x, num_groups)[None], [1] * share.ranks.size, share.ranks)
    return _normalize(x, weights, moments, weight, bias, eps)


def group_norm_with_edges(
    share: Share, func: Function, x: Tensor, num_groups: int, weight: Given = None, bias: Given = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Computes group_norm with one more row at each side for the convolution that follows: the neighbours', or a copy
    of this rank's at an outer edge. They travel with the statistics, in one message."""
    weights, dim, local = share.weights(x), share.dim, _moments(x, num_groups)
    first, last = x.narrow(dim, 0, 1), x.narrow(dim, x.shape[dim] - 1, 1)
    index, peers = share.index, share.ranks.other_ranks
    edges, packed = {index - 1: first, index + 1: last}, local.flatten().view(x.dtype)
    send = {peer: torch.cat([packed, edges[peer].flatten()]) if peer in edges else packed for peer in peers}
    received = send_recv(send, {peer: allocate(part.shape, x) for peer, part in send.items()}, share.ranks).wait()
    by_rank = {index: packed} | dict(zip(peers, received, strict=True))
    moments = [by_rank[rank][: len(packed)].view(local.dtype).view(local.shape) for rank in range(share.ranks.size)]
    by_edge = {peer: by_rank[peer][len(packed) :].view(edge.shape) for peer, edge in edges.items() if peer in by_rank}
    before, after = (edges | by_edge).values()
    return _normalize(torch.cat([before, x, after], dim), weights, torch.stack(moments), weight, bias, eps)


def _normalize(x: Tensor, weights: Tensor, moments: Tensor, weight: Given, bias: Given, eps: float) -> Tensor:
    """Normalizes by the moments [ranks, 2, batch, groups], of which each rank has its share of `weights`."""
    # Mean of variances, and variance of means (Chan).
    means, variances = moments.unbind(1)
    weights = weights.to(means.dtype)
    combined = torch.tensordot(weights, means, 1)
    of_all = torch.stack([combined, torch.tensordot(weights, variances + (means - combined).square(), 1)])
    # In one fused kernel, in float32: a batch norm whose channels are all items' channels.
    batch, channels = x.shape[:2]
    by_group = (2, batch, of_all.shape[2], channels // of_all.shape[2])
    mean, variance = of_all.unsqueeze(3).expand(by_group).reshape(2, -1)
    weight, bias = (None if value is None else value.to(mean.dtype).repeat(batch) for value in (weight, bias))
    rows = x.reshape(1, batch * channels, -1)
    return F.batch_norm(rows, mean, variance, weight, bias, False, 0.0, eps).view(x.shape)


def _moments(x: Tensor, num_groups: int) -> Tensor:
    """Returns [2, batch, groups]: mean and variance, in float32 at least."""
    if x.device.type == "cpu" and x.dtype in WIDE:  # where torch's var_mean takes ten times as long
        x = x.reshape(x.shape[0], num_groups, -1)
        mean = x.mean(2)
        return torch.stack([mean, (x - mean.unsqueeze(2)).square_().mean(2)])
    x = x.reshape(x.shape[0], num_groups, -1, x.shape[-1])
    if x.dtype in WIDE:
        variance, mean = torch.var_mean(x, (2, 3), correction=0)
        return torch.stack([mean, variance])
    # In pieces of whole rows: a copy of all of it in float32 would be twice its size.
    rows = x.reshape(-1, x.shape[3])
    pieces = rows.split(max(1, PIECE_ELEMENTS // x.shape[3]))
    of_each = [torch.stack(torch.var_mean(piece.float(), 1, correction=0)) for piece in pieces]
    variances, means = torch.cat(of_each, 1).view(2, *x.shape[:3])
    variance, mean = torch.var_mean(means, 2, correction=0)
    return torch.stack([mean, variance + variances.mean(2)])


def norm(
    share: Share, func: Function, x: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, **options: Any
) -> Tensor:
    """Computes torch.norm of each channel over all rows and columns of [batch, rows, columns, channels], in float32."""
    if p not in (2, 2.0) or tuple(dim or ()) != (1, 2) or not keepdim or any(options.values()):
        raise Unsplittable(f"norm over dim {dim} of {tuple(x.shape)}")
    local = func(x, 2, dim, True, dtype=x.dtype if x.dtype in WIDE else torch.float32)
    all_ranks = all_gather_v(local[None], [1] * share.ranks.size, share.ranks)
    return all_ranks.square().sum(0).sqrt().to(x.dtype)


def attend(share: Share, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attends with one head over all pixels; takes and returns [B, C, (T,) rows, columns] of this rank. Collective."""
    # In a ring no rank ever has all keys and values, which in a large video would set the peak memory.
    rows = share.rows_of(query, "attention")
    sizes = [key[0, 0].numel() // rows[share.index] * rows_of_rank for rows_of_rank in rows]
    merge = Merge(in_float32=True)
    queries, block = _one_head(query), (_one_head(key), _one_head(value))
    for _, (keys, values) in rotate(block, sizes, share.ranks):
        merge.add(*attend_block(queries, keys, values, None, None, "native"))
    return merge.result(queries, None)[:, :, 0].transpose(1, 2).reshape(query.shape)


def _one_head(x: Tensor) -> Tensor:
    """Reshapes [B, C, ...] to [B, tokens, 1, C]."""
    return x.flatten(2).transpose(1, 2).unsqueeze(2).contiguous()


def interpolate(
    share: Share, func: Function, x: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest",
    *args: Any, **kwargs: Any,
) -> Tensor:  # fmt: skip
    y = func(x, size, scale_factor, mode, *args, **kwargs)
    before, after = x.shape[share.dim], y.shape[share.dim]
    smooth, uneven = not mode.startswith("nearest"), before % after and after % before
    if (smooth and before != after) or uneven or not share.is_level(y):
        raise Unsplittable(f"interpolation ({mode}) of {tuple(x.shape)} to {tuple(y.shape)}")
    return y


def pool(
    share: Share, func: Function, x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, *args: Any,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    sizes = (kernel_size, stride or kernel_size, padding)
    width, step, pad = (size if isinstance(size, int) else size[share.dim] for size in sizes)
    y = func(x, kernel_size, stride, padding, *args, **kwargs)
    if width != step or pad or not share.is_level(y):
        raise Unsplittable(f"pooling {kernel_size} with stride {stride} of {tuple(x.shape)}")
    return y


def noise(share: Share, func: Function, *args: Any, **kwargs: Any) -> Tensor:
    """Draws the full noise on every rank, from the same state of the generator, and returns this rank's rows of it."""
    like = isinstance(args[0], Tensor)
    flat = not like and isinstance(args[0], int)
    shape = [*(args if flat else args[0].shape if like else args[0])]
    if len(shape) < 2 or shape[share.dim] % share.local_units:
        raise Unsplittable(f"{func.__name__} of {tuple(shape)}")
    shape[share.dim] = shape[share.dim] // share.local_units * sum(share.units)
    if like:
        kwargs = {"dtype": args[0].dtype, "device": args[0].device, **kwargs}
        kwargs.pop("memory_format", None)
    draw: dict[str, Function] = {"randn_like": torch.randn, "rand_like": torch.rand}
    return share.split(draw.get(func.__name__, func)(shape, **kwargs))


def reduce(share: Share, func: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    positional = next((arg for arg in args if isinstance(arg, int | tuple | list) and not isinstance(arg, bool)), None)
    dim = kwargs.get("dim", positional)
    dims = [dim] if isinstance(dim, int) else dim
    if x.ndim >= 4 and (dims is None or any(each % x.ndim == x.ndim + share.dim for each in dims)):
        raise Unsplittable(f"{func.__name__} over dim {dim} of {tuple(x.shape)}")
    return func(x, *args, **kwargs)


def refuse_attention(share: Share, func: Function, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Refuses attention over this rank's rows alone."""
    raise Unsplittable(f"attention of {tuple(query.shape)}, which belongs to no block that can be divided")


def refuse(share: Share, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    shape = next((tuple(arg.shape) for arg in args if isinstance(arg, Tensor)), ())
    raise Unsplittable(f"{func.__name__} of {shape}")
