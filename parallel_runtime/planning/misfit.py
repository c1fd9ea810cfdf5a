"""Says what memory is missing: the sentence of a model that does not fit, with the nearest change that would fit, and
the device that lacks memory for a plan at this moment.

`MemoryModel.fits` decides; while planning resolve.py refuses with `memory.misfit`. The refusal `memory.taken` of a
plan that fitted then, at the start of its run, is in nodes/remote/lease.py."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import Refused, Sentence, say
from ..specs import Placement
from ..wire.messages import Readings
from .memory_model import FETCHED_MODES, MemoryModel
from .network_stats import cached_key_value_bytes

GIB = 2**30


def misfit(memory: MemoryModel) -> Refused:
    """Returns the refusal for one prompt at a time, with the numbers of the rank that lacks most."""
    least = min(memory.least_placements, key=lambda weights: max(memory.needed_bytes_by_rank(weights)))
    usable = [budget or 0 for budget in memory.usable_bytes_by_rank(least)]
    by_rank = zip(memory.needed_bytes_by_rank(least), usable, strict=True)
    needed, free = max(by_rank, key=lambda both: both[0] - both[1])
    host, limit, network = memory.capacity.host_bytes, memory.capacity.limited_by, memory.work.network
    out = _nearest_fit(memory)
    values: dict[str, Any] = {
        "network": network.name,
        "weights": size_in_words(network.weight_bytes),
        "activations": _activations(memory),
        "free": size_in_words(free, math.floor),
        "limit": say("memory.limited", limit=limit) if limit else "",
        "out": say("memory.raise", out=out, limit=limit) if limit else out,
    }
    unlimited = replace(memory, capacity=replace(memory.capacity, host_bytes=None)).most_resident("offload")
    if host is not None and unlimited is not None:
        fetched = size_in_words(memory.fetched_bytes(unlimited.resident_blocks), math.ceil)
        values |= {"fetched": fetched, "host": size_in_words(host, math.floor)}
        return Refused("memory.misfit.host", widget="weights", **values)
    main = "" if host is None else say("memory.host", size=size_in_words(host))
    return Refused("memory.misfit", widget="weights", **values, needed=size_in_words(needed, math.ceil), host=main)


def size_in_words(count: float, rounded: Callable[[float], int] = round) -> str:
    """Returns a size as text. Callers round a needed size up and a free one down, so that the two never look equal."""
    unit, name = (GIB, "GiB") if count >= GIB / 10 else (2**20, "MiB")
    return f"{rounded(10 * count / unit) / 10:.1f} {name}"


def _activations(memory: MemoryModel) -> str:
    computed, cached = max(memory.activation_bytes_by_rank), max(cached_key_value_bytes(memory.work, memory.degrees))
    if not cached:
        return size_in_words(computed)
    return say("memory.kept", activations=size_in_words(computed), kept=size_in_words(cached))


def _nearest_fit(memory: MemoryModel) -> Sentence:
    """Returns the sentence that names the nearest change with which the network fits."""
    work, network, degrees = memory.work, memory.work.network, memory.degrees
    if degrees.options.token_patches > 1 and _fits(replace(memory, degrees=degrees.with_options(token_patches=1))):
        return say("fits.exact")
    halved = replace(memory, work=replace(work, network=network.halved()))
    if network.weight_bytes > 1.5 * network.weights and _fits(halved):
        return say("fits.fp8")
    grows = "pipeline_degree" if degrees.pipeline_degree > 1 else "ring_degree"
    for factor in (2, 4, 8):
        more = replace(degrees, stages=(), shares=(), **{grows: getattr(degrees, grows) * factor})
        if _fits(replace(memory, degrees=more)):
            return say("fits.workers", workers=more.world_size)
    for part in (2, 4, 8, 16):
        if _fits(replace(memory, work=replace(work, tokens=max(1, work.tokens // part)))):
            return say("fits.pixels", part=part)
    return say("fits.none")


def _fits(memory: MemoryModel) -> bool:
    return any(memory.most_resident(mode) is not None for mode in ("replicate", *FETCHED_MODES))


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """A device on which `ranks` together need `needed` bytes and could have `free`."""

    device: str
    ranks: tuple[int, ...]
    needed: int
    free: int
    limited_by: str = ""

    @property
    def each(self) -> int:
        """Returns the bytes that one rank could have."""
        return max(0, self.free) // len(self.ranks)

    @property
    def sentence(self) -> Sentence:
        needed, free = size_in_words(self.needed, math.ceil), size_in_words(max(0, self.free), math.floor)
        lack = say("memory.lack", needed=needed, device=self.device, free=free)
        return say("memory.lack.limited", lack=lack, limit=self.limited_by) if self.limited_by else lack

    def __str__(self) -> str:
        return self.sentence


def shortage(
    placement: Placement, readings: Sequence[Readings], fingerprint: str, needed: Sequence[int], *,
    limits: Sequence[int | None], limited_by: str,
) -> Shortage | None:  # fmt: skip
    """Returns the device that lacks most of the bytes `needed` by its ranks for the model with this `fingerprint`; None
    where all have enough. A rank's memory of this model counts as free, its memory of other models does not. `limits`
    are what each may take of its device, and the only limits of main memory."""
    sharing: dict[str, list[int]] = {}
    for rank, device in enumerate(placement.device_names[: len(readings)]):
        sharing.setdefault(device, []).append(rank)
    shortages = []
    for device, ranks in sharing.items():
        limited = [limit for limit in (limits[rank] for rank in ranks) if limit is not None]
        limit = sum(limited) if len(limited) == len(ranks) else None
        free = _free(device, [readings[rank] for rank in ranks], fingerprint, limit)
        total = sum(needed[rank] for rank in ranks)
        if free is not None and free < total:
            by = limited_by if limit is not None else ""
            shortages.append(Shortage(device=device, ranks=tuple(ranks), needed=total, free=free, limited_by=by))
    return max(shortages, key=lambda one: one.needed - one.free, default=None)


def _free(device: str, ranks: Sequence[Readings], fingerprint: str, limit: int | None) -> int | None:
    """Returns the bytes that these ranks together could have of their device for this model; None if unknown."""
    other_models = sum(each.other_models_bytes(fingerprint) for each in ranks)
    known = [] if limit is None else [limit - other_models]
    if not device.startswith("cpu"):
        known.append(min(each.free_bytes for each in ranks) + sum(each.rank_bytes for each in ranks) - other_models)
    return min(known, default=None)
