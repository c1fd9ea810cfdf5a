"""Which kernel the attentions of one size take: what was asked for where all ranks have it, else the winner of a race,
which is held once on these machines and agreed on by the ranks.

Every rank comes to the same. Knows no streams and moves no keys. What was found is kept as long as the group lives, and
told by `results`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ...accelerators import ACCELERATORS
from ...specs import AttentionBackend
from ...wire.readings import WORTH_TELLING, Race, RacedFor
from .exchange import gather
from .kernels import FAULTS, NO_KERNEL, fits_flash, tell_once
from .masks import ToldApart
from .mesh import Axis, World
from .operators import OPERATORS, Whole, cudnn_records

REPEATS = 3
RUNS = 4  # between two looks at the clock
_LEAD = 4096  # rows of products that keep the device busy while runs are launched

log = logging.getLogger(__name__)

Seconds = Callable[[str], float]  # of one run of the kernel of this name; infinite where it has none
_CUDNN_LEADS = (9, 10)  # compute capabilities for which PyTorch itself prefers cuDNN
_WRONG = 0.05  # of the values' deviation: half precision is ten times closer
_NONSENSE = 0.5  # what was asked for by name may round more (sage)
_LOOKED_AT = 16  # queries whose rows are computed anew in float32, of the first and the last head


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the largest attention of any rank. Every rank must say the same: they race together."""

    batch: int
    queries: int
    keys: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    what: RacedFor = "block"
    mask: ToldApart | None = None


def candidates(query: Tensor, *, recorded: bool = True) -> list[AttentionBackend]:
    """What "auto" may take for blocks of such queries, the likely fastest first; "native" where there is no choice.
    `recorded`: as part of a CUDA graph, maybe."""
    found = ACCELERATORS.get(query.device.type)
    if found is None or not found.kernels or not fits_flash(query):
        return ["native"]
    return [kernel for kernel in found.kernels if kernel != "_native_cudnn" or _cudnn_leads(query, recorded)]


def rivals(query: Tensor, *, masked: bool = False, recorded: bool = True) -> list[AttentionBackend]:
    """The same for whole keys: "auto" is ComfyUI's own attention, which anything has to beat."""
    found = ACCELERATORS.get(query.device.type)
    if found is None or not found.whole or not fits_flash(query):
        return ["auto"]
    cudnn = torch.version.hip is None and (cudnn_records() or not recorded)
    there = [kernel for kernel in found.whole if not OPERATORS[kernel].missing]
    if masked:
        there = [kernel for kernel in there if OPERATORS[kernel].masks]
    return ["auto", *(kernel for kernel in there if kernel != "_native_cudnn" or cudnn)]


def chosen(
    backend: AttentionBackend,
    query: Tensor,
    sizes: Sizes,
    axis: Axis,
    own: Whole,
    lanes: int = 1,
    recorded: bool = True,
) -> AttentionBackend:
    """The kernel of a ring's blocks, or of whole keys, "auto" for `own`, as `sizes` say. `recorded`: as candidates.
    Collective over `axis` for what it has not been asked.

    Of several `lanes` each would have a race of its own, and those that compute the same must not come to other bits:
    they take the likely winner.
    """
    blocks = sizes.what == "block"
    masked = sizes.mask is not None
    if isinstance(query, FakeTensor):
        return candidates(query, recorded=recorded)[0] if blocks and backend == "auto" else backend
    if backend != "auto":
        if backend == "native" or _everywhere(backend, query, sizes, axis):
            return backend
        where = "for a ring's blocks" if blocks else "where keys are whole"
        tell_once(backend, f"not every rank has it {where}")
    here = candidates(query, recorded=recorded) if blocks else rivals(query, masked=masked, recorded=recorded)
    if lanes > 1:
        return here[0] if blocks else _likely(here, query, sizes, axis, recorded)
    if len(here) == 1 and not axis.world.unlike:
        return here[0]
    seconds = partial(_seconds, sizes, query.device, own, here)
    return cast(AttentionBackend, winner(_anywhere(query.device, blocks), sizes, axis, seconds, query.device, here[0]))


def _anywhere(device: torch.device, blocks: bool) -> Sequence[AttentionBackend]:
    """What races, whichever of them this card has: cards of another capability take part in the same race."""
    found = ACCELERATORS.get(device.type)
    if blocks:
        return (found.kernels if found else ()) or ("native",)
    return "auto", *(found.whole if found else ())


def _likely(
    names: Sequence[AttentionBackend], query: Tensor, sizes: Sizes, axis: Axis, recorded: bool
) -> AttentionBackend:
    """What won wherever it was measured, if it leads on all cards."""
    if "_native_cudnn" not in _anywhere(query.device, blocks=False):
        return "auto"
    leads = "_native_cudnn" in names and _cudnn_leads(query, recorded)
    return "_native_cudnn" if _everywhere("_native_cudnn", query, sizes, axis, leads=leads) else "auto"


def _cudnn_leads(query: Tensor, recorded: bool) -> bool:
    if torch.version.hip is not None or (recorded and not cudnn_records()):
        return False
    return torch.cuda.get_device_capability(query.device)[0] in _CUDNN_LEADS


def _everywhere(backend: AttentionBackend, query: Tensor, sizes: Sizes, axis: Axis, *, leads: bool = True) -> bool:
    """Has every rank of `axis` a kernel of this name for these sizes, which computes what it should, and `leads`?"""
    seconds = partial(_seconds, sizes, query.device, None, [backend] if leads else [], clocked=False)
    return bool(timed_by_all([backend], sizes, axis, seconds, query.device))


def _seconds(
    sizes: Sizes, device: torch.device, own: Whole | None, here: Sequence[str], name: str, *, clocked: bool = True
) -> float:
    """Of one attention of these sizes, infinite where this rank has no such kernel `here`, or one that computes
    something else; not a number where there is no memory to find out."""
    if name not in here:
        return torch.inf
    try:
        q, k, v, mask = made_up(sizes, device)
        if name in OPERATORS and OPERATORS[name].lacks(q, k, v, mask):
            return torch.inf

        def run() -> Tensor:
            if name == "auto":
                assert own is not None
                return own(q, k, v, mask, None)
            if sizes.what == "block":
                return OPERATORS[name].block(q, k, v, None)[0]
            return OPERATORS[name].whole(q, k, v, mask, None)

        if name != "auto" and not _right(run(), (q, k, v), mask, _WRONG if clocked else _NONSENSE):
            return torch.inf
        return timed(run, device) if clocked else 1.0
    except torch.OutOfMemoryError:
        return torch.nan
    except NO_KERNEL as error:
        if isinstance(error, FAULTS):
            raise
        return torch.inf


def _right(out: Tensor, given: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, tolerance: float) -> bool:
    """Some rows of it beside the same in float32. Some versions of some kernels compute something else."""
    q, k, v = given
    heads = [0, q.shape[2] - 1]
    few = q[:, :_LOOKED_AT, heads].transpose(1, 2).float() * q.shape[-1] ** -0.5
    scores = few @ k[:, :, heads].transpose(1, 2).float().transpose(-1, -2)
    if mask is not None:
        mask = (mask[:, heads] if mask.shape[1] > 1 else mask)[:, :, :_LOOKED_AT]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    expected = (scores.softmax(-1) @ v[:, :, heads].transpose(1, 2).float()).transpose(1, 2)
    away = (out[:, :_LOOKED_AT, heads].float() - expected).abs().mean()
    return bool(away <= tolerance * expected.std())  # not where it is not a number


def advice(query: Tensor, own: Whole, sizes: Sizes, alone: Axis) -> str:
    """What a worker that has the sequence to itself could gain by another kernel than its own: the name of one that is
    worth telling of, or ""."""
    names = rivals(query)
    if isinstance(query, FakeTensor) or len(names) == 1:
        return ""
    seconds = partial(_seconds, sizes, query.device, own, names)
    times = timed_by_all(names, sizes, alone, seconds, query.device)
    fastest = min(times, key=times.__getitem__, default="auto")
    return fastest if fastest != "auto" and times["auto"] > WORTH_TELLING * times[fastest] else ""


def winner(
    names: Sequence[str], sizes: Sizes, axis: Axis, seconds: Seconds, device: torch.device, usual: str = ""
) -> str:
    """The name whose slowest rank is the fastest. Collective over `axis` for sizes that it has not raced with, and so
    all ranks must have the same `names`.

    Who has no kernel on some rank is out. Where a rank measured nothing sensible nothing is known: the `usual` stays,
    or the first.
    """
    times = timed_by_all(names, sizes, axis, seconds, device) if len(names) > 1 else {}
    return min(times, key=times.__getitem__, default=usual or names[0])


def timed_by_all(
    names: Sequence[str], sizes: Sizes, axis: Axis, seconds: Seconds, device: torch.device
) -> dict[str, float]:
    """Seconds of those that every rank has, on the slowest; none where it is not known. Collective as `winner`."""
    entry, found = (sizes, axis.ranks, tuple(names)), axis.world.races
    if entry not in found and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return {}
    if entry not in found:
        measured = [taken if (taken := seconds(name)) > 0 else math.nan for name in names]
        own = torch.tensor(measured, dtype=torch.float32, device=device)
        if axis.size > 1:
            (everybodys,) = gather(own[None], [1] * axis.size, axis).wait()
            own = everybodys.amax(dim=0)  # not a number where any is not
        found[entry] = _sensible(dict(zip(names, own.tolist(), strict=True)), axis)
        if axis.index == 0 and len(found[entry]) > 1:
            log.warning("[CP] kernels: %s", _result(sizes, found[entry]))  # a worker's log begins with warnings
    return found[entry]


def _sensible(times: dict[str, float], axis: Axis) -> dict[str, float]:
    if any(map(math.isnan, times.values())):
        if axis.index == 0:
            log.warning("[CP] kernels were timed as %s: nothing sensible, so none of them is preferred", times)
        return {}
    return {name: seconds for name, seconds in times.items() if math.isfinite(seconds)}


def results(world: World) -> tuple[Race, ...]:
    """Of all races so far, the last one last."""
    return tuple(_result(sizes, times) for (sizes, _, _), times in world.races.items() if len(times) > 1)


def _result(sizes: Sizes, times: dict[str, float]) -> Race:
    names = sorted(times, key=times.__getitem__)
    return Race(described(sizes), tuple(names), tuple(round(1e6 * times[name], 1) for name in names), sizes.what)


def described(sizes: Sizes) -> str:
    """For people."""
    batch = f"{sizes.batch} x " if sizes.batch > 1 else ""
    masked = "" if sizes.mask is None else ", masked"
    dtype = str(sizes.dtype).removeprefix("torch.")
    return (
        f"{batch}{sizes.queries} queries x {sizes.keys} keys, {sizes.heads} heads of {sizes.head_dim}, {dtype}{masked}"
    )


def timed(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of some runs on an accelerator, after one that warms up. Of the device: the host launches
    ahead of it, as it does where a graph is replayed."""
    run()
    lead = torch.zeros(_LEAD, _LEAD, dtype=torch.bfloat16, device=device)
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
        for _ in range(RUNS):
            torch.mm(lead, lead)
        begin.record()
        for _ in range(RUNS):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / RUNS)
    return min(times)


def made_up(sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys, values and a mask to race with. Of whole keys they lie together, as what arrives over Ulysses."""
    generator = torch.Generator(device).manual_seed(0)
    tokens = (sizes.queries, sizes.keys, sizes.keys)
    shape = (sizes.batch, sizes.heads, sizes.head_dim)
    options: Any = {"dtype": sizes.dtype, "device": device, "generator": generator}
    if sizes.what == "whole" and sizes.queries == sizes.keys:
        together = torch.randn(sizes.keys, sizes.batch, 3 * sizes.heads, sizes.head_dim, **options)
        q, k, v = together.transpose(0, 1).split(sizes.heads, 2)
    else:
        q, k, v = (torch.randn(count, *shape, **options).transpose(0, 1) for count in tokens)
    return q, k, v, _made_up_mask(sizes, device)


def _made_up_mask(sizes: Sizes, device: torch.device) -> Tensor | None:
    """Every seventh key is hidden, from every query."""
    if sizes.mask is None:
        return None
    dtype, *apart = sizes.mask
    dims = (sizes.batch, sizes.heads, sizes.queries)
    shape = [size if told else 1 for size, told in zip(dims, apart, strict=True)]
    hidden = (torch.arange(sizes.keys, device=device) % 7 == 0).expand(*shape, sizes.keys)
    if dtype == torch.bool:
        return ~hidden
    return torch.zeros(*shape, sizes.keys, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)
