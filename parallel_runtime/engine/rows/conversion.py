"""One decode or encode of a VAE over ranks: on this rank's rows, or on its tiles of a clip.

`Conversion` takes a full tensor, into shared memory for the full result, with a self-test before the first of a class.
The model runs in a mode in which torch's functions treat a tensor as some rows of a larger one. No convolution is
hooked, so padding in a forward, caches of time chunks and copied blocks are handled alike.

`run_tiles` is for a VAE that computes tiles of clips, each by itself: every rank computes some of them, by its share,
and sends them to rank 0, which blends all of them as one process would. With two equal ranks and three tiles rank 0
computes tiles 0 and 2, and rank 1 tile 1. Each rank runs the whole method, so that all see the same tiles in the same
order; where another rank's tile would be needed, a rank other than 0 goes on with a tensor of its shape that has no
values."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...architectures.autoencoders import Tiles
from ...errors import Unsplittable
from ...specs import VAEMethod
from ..comm.collectives import Pending, allocate, send_recv
from ..comm.mesh import MeshDim
from ..split.streams import chunk_sizes
from . import functions
from .functions import Handlers, RowFunctions, Share

ATTENTION = {"optimized_attention", "optimized_vae_attention"}  # what ComfyUI's VAE blocks call, attributes of theirs
CHUNKED = "comfy_has_chunked_io"  # ComfyUI's attribute: the VAE moves its input, and writes its output, chunk by chunk
PIECE_BYTES = 64 << 20
TRIAL_COLUMNS = 4  # of the latent, with two rows a rank
TRIAL_FRAMES = {"decode": 3, "encode": 13}


def share_of(x: Tensor, unit: int, ranks: MeshDim) -> Share:
    """Returns the split of `x` along its longer side, where fewer bytes travel and the shares of rows are more even;
    `unit` rows of x make one of the latent. Raises Refused where they do not come out even."""
    dim = -2 if x.shape[-2] >= x.shape[-1] else -1
    units, left = divmod(x.shape[dim], unit)
    if left:
        raise Unsplittable(f"{x.shape[dim]} pixels are not a multiple of the {unit} that make a row of the latent")
    return Share(ranks=ranks, dim=dim, units=chunk_sizes(units, ranks.parts))


@dataclass(frozen=True)
class Conversion:
    """`model.decode` or `.encode` over ranks that compute on `device`, within `on_rows(own rows, all rows)`."""

    model: nn.Module
    method: VAEMethod
    device: torch.device
    on_rows: Callable[[int, int], AbstractContextManager[None]] = lambda own, total: nullcontext()

    def run(
        self, x: Tensor, share: Share, *, place: Tensor | None = None, tick: Callable[[], None] = lambda: None
    ) -> Tensor:
        """Returns this rank's rows of the output for the full `x`, in `place` where there is one. Collective."""
        local, options = share.split(x), dict[str, Any]()
        if getattr(self.model, CHUNKED, False):
            if self.method == "encode":
                options["device"] = self.device
            elif place is not None:
                options["output_buffer"] = place
        if "device" not in options:
            local = local.to(self.device)
        divided = nullcontext() if share.ranks.size == 1 else _dividing(self.model, share, tick)
        with self.on_rows(share.local_units, sum(share.units)), divided:
            output = getattr(self.model, self.method)(local.contiguous(), **options)
        if place is None or output is place:
            return output
        made = output.unsqueeze(2) if output.ndim == 4 and place.ndim == 5 else output  # of one frame: no dim of time
        if made.shape != place.shape:
            raise Unsplittable(f"a worker made {tuple(made.shape)} where {tuple(place.shape)} was expected")
        # To main memory, and widened there, a piece at a time: a wide copy would fill the device.
        dim = 2 if made.ndim == 5 else 0
        step = max(1, made.shape[dim] * PIECE_BYTES // max(1, made.numel() * made.element_size()))
        for piece, target in zip(made.split(step, dim), place.split(step, dim), strict=True):
            target.copy_(piece.to(place.device))
        return output

    def self_test(self, x: Tensor, full_share: Share) -> float:
        """Tests a VAE's class by a small input on the ranks of `full_share`, the share of `x`, against the same one on
        this rank only. Collective.

        Finds what the mode cannot see of functions that read other rows (indexing, concatenation, products along rows).
        Returns the relative L2 distance of this rank's rows, for an input like `x`; NaN where they are not finite."""
        ranks, dim, unit = full_share.ranks, full_share.dim, x.shape[full_share.dim] // sum(full_share.units)
        total = 2 * ranks.size
        share = Share(ranks=ranks, dim=dim, units=(2,) * ranks.size)
        single_rank = Share(ranks=MeshDim(), dim=dim, units=(total,))
        shape, plane = list(x.shape), (total * unit, TRIAL_COLUMNS * unit)
        shape[0] = min(2, shape[0])
        if x.ndim == 5:
            shape[2] = min(TRIAL_FRAMES[self.method], shape[2])
        shape[-2:] = plane if dim == -2 else plane[::-1]
        small = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
        runs = []
        for part in (single_rank, share):
            torch.manual_seed(2)
            runs.append(self.run(small, part).float())
        full, local = runs
        expected = share.split(full)
        if expected.shape != local.shape:
            return float("inf")
        return float((local - expected).norm() / expected.norm().clamp_min(1e-12))


def error_limit(dtype: torch.dtype) -> float:
    """Returns the largest distance that a self-test allows: rounding alone comes to 2e-2 in bfloat16."""
    return 1e-3 if dtype in functions.WIDE else 5e-2


@contextmanager
def _dividing(model: nn.Module, share: Share, tick: Callable[[], None]) -> Iterator[None]:
    """In this context `model` runs on this rank's rows."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        tick()
        return functions.attend(share, query, key, value)

    with ExitStack() as stack:
        for module in model.modules():
            for name in vars(module).keys() & ATTENTION:
                stack.callback(setattr, module, name, getattr(module, name))
                setattr(module, name, attend)
        stack.enter_context(RowFunctions(share, HANDLERS, tick))
        yield


def leave_undivided(module: nn.Module) -> None:
    """Has `module` run as it is also in a divided model. It attends along time only, each pixel for itself."""
    forward = module.forward

    def undivided(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return forward(*args, **kwargs)

    module.forward = undivided


T = Tensor
REDUCTIONS = (
    torch.mean, T.mean, torch.sum, T.sum, torch.var, T.var, torch.std, T.std, torch.var_mean, torch.norm, T.norm,
    torch.amax, T.amax, torch.amin, T.amin, torch.softmax, T.softmax, F.softmax, torch.cumsum, T.cumsum, torch.flip,
    T.flip,
)  # fmt: skip
ACROSS = (
    F.unfold, F.fold, F.grid_sample, F.instance_norm, torch.roll, T.roll, F.max_pool2d, F.max_pool3d,
    F.adaptive_avg_pool2d, F.adaptive_avg_pool3d, torch.fft.fft2, torch.fft.rfft2, torch.fft.fftn,
)  # fmt: skip
HANDLERS: Handlers = {
    F.pad: functions.pad,
    F.conv2d: functions.convolution,
    F.conv3d: functions.convolution,
    torch.cudnn_convolution: functions.cudnn_convolution,
    F.conv_transpose2d: functions.transposed,
    F.conv_transpose3d: functions.transposed,
    F.group_norm: functions.group_norm,
    F.interpolate: functions.interpolate,
    F.avg_pool2d: functions.pool,
    F.avg_pool3d: functions.pool,
    F.scaled_dot_product_attention: functions.refuse_attention,
    **dict.fromkeys((torch.randn, torch.rand, torch.randn_like, torch.rand_like), functions.noise),
    **dict.fromkeys(REDUCTIONS, functions.reduce),
    **dict.fromkeys(ACROSS, functions.refuse),
}


META = torch.device("meta")


def run_tiles(
    model: Any, tiles: Tiles, method: VAEMethod, x: Tensor, ranks: MeshDim, device: torch.device, *,
    place: Tensor | None = None, tick: Callable[[], None] = lambda: None,
) -> Tensor:  # fmt: skip
    """Returns `model.decode(x)` or `model.encode(x)` on rank 0, in `place` where there is one; a tensor without values
    on other ranks. `tick` is called before each tile, on every rank. Collective."""
    compute, owners = getattr(model, getattr(tiles, method)), _owners(ranks.shares or (1,) * ranks.size)
    first, sent = ranks.index == 0, list[tuple[Pending, Tensor]]()

    def tile_or_stand_in(tile: Tensor) -> Tensor:
        tick()
        owner, shape = next(owners), tiles.output(model, method, tuple(tile.shape))
        if first and owner:
            (received,) = send_recv({}, {owner: allocate(shape, tile)}, ranks).wait()
            return received
        if owner != ranks.index:
            return torch.empty(shape, dtype=tile.dtype, device=META)
        made: Tensor = compute(tile)
        if tuple(made.shape) != shape:
            raise Unsplittable(f"a worker made {tuple(made.shape)} where {shape} was expected")
        if first:
            return made
        while sent:  # so that no more than one waits in memory for rank 0
            sent.pop()[0].wait()
        sent.append((send_recv({0: made}, {}, ranks), made))
        return made.to(META)

    same = copy.copy(model)  # its layers are those of `model`
    setattr(same, getattr(tiles, method), tile_or_stand_in)
    if method == "encode":
        output: Tensor = same.encode(x, device=device)
    else:
        shape = tuple(same.decode_output_shape(tuple(x.shape)))
        buffer = place if first and place is not None else torch.empty(shape, device="cpu" if first else META)
        output = same.decode(x.to(device), output_buffer=buffer)
    for pending, _ in sent:
        pending.wait()
    if first and place is not None and output is not place:
        place.copy_(output)
    return output


def _owners(shares: Sequence[int]) -> Iterator[int]:
    """Yields the rank of each tile: the one that has the fewest for its share, the first of several."""
    done = [0] * len(shares)
    while True:
        owner = min(range(len(shares)), key=lambda rank: (done[rank] + 1) / shares[rank])
        done[owner] += 1
        yield owner
