"""Where the weights of a model shall be: decided once for all ranks, by arithmetic on agreed figures."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..errors import Refused
from ..specs import Parallelism, Storage, WeightsChoice, WeightsMode
from .cost import Link, Work, activation_bytes, evaluation_seconds
from .pipelines import held_bytes, kept_beside_bytes, kept_bytes
from .sentences import say

GIB = 2**30
USABLE = 0.92  # of a device that is filled on purpose
ALIKE = 1.1  # predictions that are no further apart say nothing
SLOW = 4e9  # bytes/s: an Ethernet, and no bus
BUFFERS = 2  # blocks that are on the device beside those at rest
MODES: tuple[WeightsMode, ...] = ("offload", "shard")  # where alike the first: it has nobody to wait for


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What a worker may take of its device, and the workers of a machine together of main memory; None: no limit.

    `limited_by` names the setting that says so, where it is not what is free.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    limited_by: str = ""


@dataclass(frozen=True, kw_only=True)
class Prospect:
    """A way to keep the weights: bytes of them on each device, and of those that are fetched in an evaluation; the
    seconds of an evaluation, of which `exposed` are spent waiting for weights, 0 where nothing was measured. `rows` of
    a batch are evaluated at once, 0: all, those of several prompts too."""

    storage: Storage
    held_bytes: int
    fetched_bytes: int = 0
    seconds: float = 0.0
    exposed: float = 0.0
    rows: int = 0


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is to be computed, on what: all that a decision goes by."""

    work: Work
    degrees: Parallelism
    capacity: Capacity
    link: Link | None = None

    @property
    def blocks(self) -> tuple[int, ...]:
        return self.work.figures.blocks

    @property
    def prompts(self) -> int:
        """That a rank evaluates in one batch."""
        return -(-self.work.prompts // self.degrees.cfg_degree)

    @property
    def one_by_one(self) -> Case:
        """The same with one prompt an evaluation, and not all of a rank's in one batch."""
        return replace(self, work=replace(self.work, prompts=1))

    def allows(self, mode: WeightsMode) -> bool:
        """Without blocks that a plan knows weights are whole, and so are parts without anybody to share them with; a
        stage of a pipeline has its blocks on its device."""
        if self.degrees.pipeline_degree > 1:
            return mode == "replicate"
        alone = mode == "shard" and self.degrees.context_parallel_size == 1
        return mode == "replicate" or not (alone or len(self.blocks) <= BUFFERS)

    def prospect(self, storage: Storage) -> Prospect:
        whole, ranks = self.work.figures.weight_bytes, self.degrees.context_parallel_size
        if storage.mode == "replicate":
            held = held_bytes(self.work.figures, self.degrees)
            return Prospect(storage=storage, held_bytes=held, seconds=self._compute())
        fetched = sum(self.blocks) * (len(self.blocks) - storage.resident) // len(self.blocks)
        kept = -(-fetched // ranks) if storage.mode == "shard" else 0
        exposed = max(0.0, self._travel(storage.mode, fetched) - self._compute())
        return Prospect(
            storage=storage,
            held_bytes=whole - fetched + kept,
            fetched_bytes=fetched,
            seconds=self._compute() + exposed,
            exposed=exposed,
        )

    def beside_bytes(self, way: Prospect) -> int:
        """What a device needs at the peak beside the weights at rest."""
        buffers = BUFFERS * max(self.blocks) if way.fetched_bytes else 0
        work = (self.one_by_one if way.rows else self).work
        return buffers + activation_bytes(work, self.degrees) + kept_beside_bytes(work, self.degrees)

    def fits(self, way: Prospect, *, usable: float = USABLE) -> bool:
        device, host = self.capacity.device_bytes, self.capacity.host_bytes
        if device is not None and way.held_bytes + self.beside_bytes(way) > usable * device:
            return False
        return way.storage.mode != "offload" or host is None or way.fetched_bytes <= host

    def fullest(self, mode: WeightsMode) -> Prospect | None:
        """With as many blocks resident as fit; None where not even none does."""
        most = len(self.blocks) - BUFFERS - 1 if self.allows(mode) else -1
        ways = (self.prospect(Storage(mode=mode, resident=resident)) for resident in range(most, -1, -1))
        return next(filter(self.fits, ways), None)

    def _compute(self) -> float:
        known = self.link is not None and self.link.flops_per_second > 0
        if not known or self.link is None:
            return 0.0
        return self.prompts * evaluation_seconds(self.work, self.degrees, self.link)

    def _travel(self, mode: WeightsMode, fetched: int) -> float:
        if self.link is None:
            return 0.0
        others = (self.degrees.context_parallel_size - 1) / self.degrees.context_parallel_size
        shard = mode == "shard"
        speed = self.link.bytes_per_second if shard else self.link.host_bytes_per_second
        return fetched * (others if shard else 1.0) / speed if speed else 0.0


def decide(choice: WeightsChoice, case: Case, *, before: Storage | None = None) -> Prospect:
    """What `choice` comes to. `before` is what the workers have: they keep it where another is hardly better.

    The prompts of a rank are evaluated at once where there is memory for that, else one by one, which costs whole
    weights nothing, and others a second fetch. Raises Refused where auto finds no way, with the numbers and what would
    work.
    """
    if choice != "auto":
        storage = Storage(mode=_asked(choice, case))
        way = case.prospect(storage)
        return way if case.fits(way, usable=1.0) else _in_turn(case.one_by_one.prospect(storage), case)
    asked, ways = _first(case)
    if not ways:
        raise Refused(_too_large(asked))
    best = _best(ways, asked, before)
    return best if asked is case else _in_turn(best, case)


def _first(case: Case) -> tuple[Case, list[Prospect]]:
    """What fits: whole weights before others, and all prompts at once before one by one."""
    each = case.one_by_one
    for ways in (_whole, _in_parts):
        for asked in (case, each):
            if found := ways(asked):
                return asked, found
    return each, []


def _whole(case: Case) -> list[Prospect]:
    whole = case.prospect(Storage())
    return [whole] if case.fits(whole, usable=1.0) else []


def _in_turn(way: Prospect, case: Case) -> Prospect:
    return replace(way, rows=case.work.rows) if case.prompts > 1 else way


def why_whole(choice: WeightsChoice, way: Prospect, case: Case) -> str:
    """Why weights that were to be elsewhere are whole on every device; "" where they are as asked."""
    if choice in ("auto", way.storage.mode):
        return ""
    name, degrees = case.work.figures.name, case.degrees
    if not case.allows("offload"):
        return say("note.unfetched", weights=choice, name=name)
    key = "note.alone" if degrees.cfg_degree * degrees.data_degree == 1 else "note.alone.each"
    return say(key, weights=choice, name=name)


def as_one_pays(branches: Case, as_one: Case) -> bool:
    """Whether weights that fit no device have a place, or are clearly waited for less, where all workers share both
    prompts (`as_one`), and not where each half of them has a prompt and weights of its own (`branches`)."""
    return not _whole(branches) and _seconds(branches) > ALIKE * _seconds(as_one)


def fits_whole(case: Case) -> bool:
    """Without fetching anything."""
    return any(_whole(each) for each in (case, case.one_by_one))


def has_place_nearby(case: Case) -> bool:
    """Whether its weights are whole on each device, or fetched over a link that is not slow."""
    link = case.link
    fast = {
        "offload": link is None or not 0 < link.host_bytes_per_second < SLOW,
        "shard": link is None or not 0 < link.bytes_per_second < SLOW,
    }
    ways = [way for each in (case, case.one_by_one) for way in _in_parts(each)]
    return fits_whole(case) or any(fast[way.storage.mode] for way in ways)


def _seconds(case: Case) -> float:
    """Of evaluating all prompts, with weights where auto would have them; infinite where they fit nowhere."""
    asked, ways = _first(case)
    times = 1 if asked is case else case.prompts
    return times * min((way.seconds for way in ways), default=math.inf)


def _in_parts(case: Case) -> list[Prospect]:
    """What fits, of the ways not to have all weights on every device."""
    return [way for mode in MODES if (way := case.fullest(mode))]


def _asked(mode: WeightsMode, case: Case) -> WeightsMode:
    return mode if case.allows(mode) else "replicate"


def _best(ways: list[Prospect], case: Case, before: Storage | None) -> Prospect:
    least = min(way.seconds for way in ways)
    best = next(way for way in ways if way.seconds <= least * ALIKE)
    return case.prospect(before) if before is not None and _hardly_better(best.storage, before, case) else best


def _hardly_better(best: Storage, before: Storage, case: Case) -> bool:
    """A tenth of the blocks at most would be gained, and changing that would load the model anew."""
    return best.mode == before.mode and 0 <= best.resident - before.resident <= math.ceil(len(case.blocks) / 10)


def _too_large(case: Case) -> str:
    ways = [case.prospect(Storage(mode=mode)) for mode in MODES if case.allows(mode)] or [case.prospect(Storage())]
    least, figures = min(way.held_bytes + case.beside_bytes(way) for way in ways), case.work.figures
    host, limit, usable = case.capacity.host_bytes, case.capacity.limited_by, USABLE * (case.capacity.device_bytes or 0)
    return (
        f"{figures.name} does not fit: {size_in_words(figures.weight_bytes)} of weights, and for this picture "
        f"{_beside(case)} beside them on each device. A worker needs {size_in_words(least)} at least, and may take "
        f"{size_in_words(usable)} of its device{f' ({limit} says so)' if limit else ''}"
        f"{'' if host is None else f'; {size_in_words(host)} of main memory are free'}. {_way_out(case)}"
        f"{f', or raise {limit}' if limit else ''}"
    )


def _beside(case: Case) -> str:
    """What is on a device beside the weights."""
    computed, kept = activation_bytes(case.work, case.degrees), kept_bytes(case.work, case.degrees)
    if not kept:
        return size_in_words(computed)
    return f"{size_in_words(computed)} and {size_in_words(kept)} of keys and values for patches"


def size_in_words(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 2**20:.1f} MiB"


def _way_out(case: Case) -> str:
    """The nearest thing that fits."""
    figures = case.work.figures
    if case.degrees.patches > 1 and _any(replace(case, degrees=replace(case.degrees, patches=1))):
        return "With patches 1, which keeps none, it would fit"
    blocks = tuple(size // 2 for size in figures.blocks)
    half = replace(figures, weight_bytes=figures.weight_bytes // 2, blocks=blocks)
    if figures.weight_bytes > 1.5 * figures.weights and _any(replace(case, work=replace(case.work, figures=half))):
        return "A file in fp8 would fit"
    for factor in (2, 4, 8):
        more = _times(case.degrees, factor)
        if _any(replace(case, degrees=more)):
            return f"{more.world_size} workers on as many devices would fit"
    for part in (2, 4, 8, 16):
        if _any(replace(case, work=replace(case.work, tokens=max(1, case.work.tokens // part)))):
            return f"A picture or video with 1/{part} of the pixels would fit"
    return "Take a smaller model"


def _times(degrees: Parallelism, factor: int) -> Parallelism:
    """So many times the workers."""
    if degrees.pipeline_degree > 1:
        return replace(degrees, pipeline_degree=degrees.pipeline_degree * factor, stages=())
    return replace(degrees, ring_degree=degrees.ring_degree * factor)


def _any(case: Case) -> bool:
    return bool(_first(case)[1])
