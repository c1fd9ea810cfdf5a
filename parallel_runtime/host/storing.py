"""Where the weights of a model shall be: decided once for all ranks, by arithmetic on agreed figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from ..errors import Refused
from ..specs import Parallelism, Storage, WeightsChoice, WeightsMode
from .cost import Link, Work, activation_bytes, activation_bytes_of_each, evaluation_seconds
from .pipelines import held_bytes, kept_bytes
from .sentences import say
from .shares import in_proportion

GIB = 2**30
USABLE = 0.92  # of a device that is filled on purpose
ALIKE = 1.1  # predictions that are no further apart say nothing
SLOW = 4e9  # bytes/s: an Ethernet, and no bus
BUFFERS = 2  # blocks that are on the device beside those at rest
MODES: tuple[WeightsMode, ...] = ("offload", "shard")  # where alike the first: it has nobody to wait for


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What a worker may take of its device, and the workers of a machine together of main memory; None: no limit. Where
    devices have unlike room `ranks` is each one's, in rank order, and `device_bytes` the least.

    `limited_by` names the setting that says so, where it is not what is free.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None
    limited_by: str = ""
    ranks: tuple[int, ...] = ()

    @classmethod
    def of_each(cls, ranks: Sequence[int], *, host_bytes: int | None = None, limited_by: str = "") -> Capacity:
        unlike = tuple(ranks) if len(set(ranks)) > 1 else ()
        return cls(device_bytes=min(ranks), host_bytes=host_bytes, limited_by=limited_by, ranks=unlike)

    def each(self, workers: int) -> tuple[int | None, ...]:
        """Of so many workers; others than those that are known have the least."""
        return self.ranks if len(self.ranks) == workers else (self.device_bytes,) * workers

    def of(self, ranks: Sequence[int]) -> Capacity:
        """That of these of the workers."""
        if not self.ranks:
            return self
        rooms = [self.ranks[rank] for rank in ranks]
        return self.of_each(rooms, host_bytes=self.host_bytes, limited_by=self.limited_by)

    def at_most(self, most: int, ranks: Collection[int], workers: int) -> Capacity:
        """The same where these of the workers may take so much and no more."""
        known = (most if room is None else room for room in self.each(workers))
        each = [min(room, most) if rank in ranks else room for rank, room in enumerate(known)]
        return self.of_each(each, host_bytes=self.host_bytes, limited_by=self.limited_by)


@dataclass(frozen=True, kw_only=True)
class Prospect:
    """A way to keep the weights: the bytes of them that each rank's device holds, and the most that one fetches in an
    evaluation; the seconds of an evaluation, of which `exposed` are spent waiting for weights, 0 where nothing was
    measured. `rows` of a batch are evaluated at once, 0: all, those of several prompts too."""

    storage: Storage
    held: tuple[int, ...]
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

    @property
    def room(self) -> tuple[int | None, ...]:
        """What each rank may take of its device."""
        return self.capacity.each(self.degrees.world_size)

    def allows(self, mode: WeightsMode) -> bool:
        """Without blocks that a plan knows weights are whole, and so are parts without anybody to share them with; a
        stage of a pipeline has its blocks on its device."""
        if self.degrees.pipeline_degree > 1:
            return mode == "replicate"
        alone = mode == "shard" and self.degrees.context_parallel_size == 1
        return mode == "replicate" or not (alone or len(self.blocks) <= BUFFERS)

    def prospect(self, storage: Storage) -> Prospect:
        fetched = 0 if storage.mode == "replicate" else self._away(storage.resident)
        computed = self._compute()
        exposed = max(0.0, self._travel(storage, fetched) - computed)
        held, seconds = self.held(storage), computed + exposed
        return Prospect(storage=storage, held=held, fetched_bytes=fetched, seconds=seconds, exposed=exposed)

    def held(self, storage: Storage) -> tuple[int, ...]:
        """Of weights, by each rank at rest."""
        whole, ranks = self.work.figures.weight_bytes, range(self.degrees.world_size)
        if storage.mode == "replicate":
            return held_bytes(self.work.figures, self.degrees)
        away = [self._away(storage.resident_on(rank)) for rank in ranks]
        if storage.mode == "offload":
            return tuple(whole - each for each in away)
        parts = zip(away, self._parts(storage), strict=True)
        return tuple(whole - each + -(-each * part // lane) for each, (part, lane) in parts)

    def beside(self, way: Prospect) -> tuple[int, ...]:
        """What each rank's device needs at the peak beside the weights at rest."""
        work = (self.one_by_one if way.rows else self).work
        computed, kept = activation_bytes_of_each(work, self.degrees), kept_bytes(work, self.degrees)
        buffers = map(self._buffers, self._residents(way.storage))
        return tuple(map(sum, zip(buffers, computed, kept, strict=True)))

    def needed(self, way: Prospect) -> tuple[int, ...]:
        """By each rank at its peak."""
        return tuple(weights + more for weights, more in zip(way.held, self.beside(way), strict=True))

    def fits(self, way: Prospect, *, usable: float = USABLE) -> bool:
        host = self.capacity.host_bytes
        for room, needed in zip(self.room, self.needed(way), strict=True):
            if room is not None and needed > usable * room:
                return False
        return way.storage.mode != "offload" or host is None or way.fetched_bytes <= host

    def fullest(self, mode: WeightsMode) -> Prospect | None:
        """With as many blocks resident as fit; None where not even none does."""
        if not self.allows(mode):
            return None
        ways = [self._each_its_own()] if mode == "offload" else (self.in_parts(count) for count in self._counts)
        found = (self.prospect(storage) for storage in ways if storage)
        return next(filter(self.fits, found), None)

    def in_parts(self, resident: int) -> Storage:
        """A shard with so many blocks resident, the others in parts by what is free for them beside all else; alike
        where memory is, and that fits."""
        alike = Storage(mode="shard", resident=resident)
        if None in self.room:
            return alike
        rooms, bare = [room or 0 for room in self.room], Prospect(storage=alike, held=self.held(alike))
        if max(rooms) <= ALIKE * min(rooms) and self.fits(bare):
            return alike
        others = self.work.figures.weight_bytes - self._away(resident)
        free = [USABLE * room - others - more for room, more in zip(rooms, self.beside(bare), strict=True)]
        parts = in_proportion([max(1.0, size) for size in free])
        return replace(alike, parts=parts) if len(set(parts)) > 1 else alike

    def _each_its_own(self) -> Storage | None:
        """Offloaded with as many blocks resident on each rank as it has room for; None where one has none."""
        activations = activation_bytes_of_each(self.work, self.degrees)
        most = [self._most(room, more) for room, more in zip(self.room, activations, strict=True)]
        counts = [count for count in most if count is not None]
        if len(counts) < len(most):
            return None
        unlike = tuple(counts) if len(set(counts)) > 1 else ()
        return Storage(mode="offload", resident=min(counts), residents=unlike)

    def _most(self, room: int | None, activations: int) -> int | None:
        """Blocks that are resident where so much room is; all of them need no buffers."""
        for count in (len(self.blocks), *self._counts):
            held = self.work.figures.weight_bytes - self._away(count)
            if room is None or held + self._buffers(count) + activations <= USABLE * room:
                return count
        return None

    @property
    def _counts(self) -> range:
        """Numbers of resident blocks: more would need as much as whole weights."""
        return range(len(self.blocks) - BUFFERS - 1, -1, -1)

    def _away(self, resident: int) -> int:
        """Bytes of the blocks that are fetched where so many are resident."""
        return sum(self.blocks) * (len(self.blocks) - resident) // len(self.blocks)

    def _residents(self, storage: Storage) -> tuple[int, ...]:
        """Blocks that are whole on each rank at rest."""
        ranks = range(self.degrees.world_size)
        return tuple(len(self.blocks) if storage.mode == "replicate" else storage.resident_on(rank) for rank in ranks)

    def _buffers(self, resident: int) -> int:
        """What the blocks that are fetched take turns in, where so many are resident."""
        return BUFFERS * max(self.blocks) if resident < len(self.blocks) else 0

    def _compute(self) -> float:
        known = self.link is not None and self.link.flops_per_second > 0
        if not known or self.link is None:
            return 0.0
        return self.prompts * evaluation_seconds(self.work, self.degrees, self.link)

    def _travel(self, storage: Storage, fetched: int) -> float:
        """Seconds of the rank that has least of its own."""
        if self.link is None:
            return 0.0
        own = min(part / lane for part, lane in self._parts(storage)) if storage.mode == "shard" else 0.0
        speed = self.link.bytes_per_second if storage.mode == "shard" else self.link.host_bytes_per_second
        return fetched * (1 - own) / speed if speed else 0.0

    def _parts(self, storage: Storage) -> list[tuple[int, int]]:
        """Of each rank in a shard: its own, of those of its lane."""
        size = self.degrees.context_parallel_size
        parts = storage.parts or (1,) * self.degrees.world_size
        return [(part, sum(parts[rank // size * size :][:size])) for rank, part in enumerate(parts)]


def decide(choice: WeightsChoice, case: Case, *, before: Storage | None = None) -> Prospect:
    """What `choice` comes to. `before` is what the workers have: they keep it where another is hardly better.

    The prompts of a rank are evaluated at once where there is memory for that, else one by one, which costs whole
    weights nothing, and others a second fetch. Raises Refused where auto finds no way, with the numbers and what would
    work.
    """
    if choice != "auto":
        way = case.prospect(_as_little(_asked(choice, case), case, before))
        return way if case.fits(way, usable=1.0) else _in_turn(case.one_by_one.prospect(way.storage), case)
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


def auto_seconds(case: Case) -> float:
    """Of evaluating all prompts, with weights where auto would have them; infinite where they fit nowhere."""
    asked, ways = _first(case)
    times = 1 if asked is case else case.prompts
    return times * min((way.seconds for way in ways), default=math.inf)


def _in_parts(case: Case) -> list[Prospect]:
    """What fits, of the ways not to have all weights on every device."""
    return [way for mode in MODES if (way := case.fullest(mode))]


def _asked(mode: WeightsMode, case: Case) -> WeightsMode:
    return mode if case.allows(mode) else "replicate"


def _as_little(mode: WeightsMode, case: Case, before: Storage | None) -> Storage:
    """As can be on each device; what the workers have stays where it is that."""
    kept = before is not None and replace(before, parts=()) == Storage(mode=mode)
    if before is not None and kept and case.fits(case.prospect(before)):
        return before
    return case.in_parts(0) if mode == "shard" else Storage(mode=mode)


def _best(ways: list[Prospect], case: Case, before: Storage | None) -> Prospect:
    least = min(way.seconds for way in ways)
    best = next(way for way in ways if way.seconds <= least * ALIKE)
    return case.prospect(before) if before is not None and _hardly_better(best.storage, before, case) else best


def _hardly_better(best: Storage, before: Storage, case: Case) -> bool:
    """A tenth of the blocks at most would be gained, and changing that would load the model anew."""
    if best.mode != before.mode or not case.fits(case.prospect(before)):
        return False
    gained = [best.resident_on(rank) - before.resident_on(rank) for rank in range(case.degrees.world_size)]
    return min(gained) >= 0 and max(gained) <= math.ceil(len(case.blocks) / 10)


def _too_large(case: Case) -> str:
    ways = [case.prospect(Storage(mode=mode)) for mode in MODES if case.allows(mode)] or [case.prospect(Storage())]
    least, figures = min((case.needed(way) for way in ways), key=max), case.work.figures
    host, limit = case.capacity.host_bytes, case.capacity.limited_by
    room = [USABLE * (of_rank or 0) for of_rank in case.room]
    needed, free = max(zip(least, room, strict=True), key=lambda both: both[0] - both[1])
    return (
        f"{figures.name} does not fit: {size_in_words(figures.weight_bytes)} of weights, and for this picture "
        f"{_beside(case)} beside them on each device. A worker needs {size_in_words(needed, math.ceil)} at least, and "
        f"may take {size_in_words(free, math.floor)} of its device{f' ({limit} says so)' if limit else ''}"
        f"{'' if host is None else f'; {size_in_words(host)} of main memory are free'}. {_way_out(case)}"
        f"{f', or raise {limit}' if limit else ''}"
    )


def _beside(case: Case) -> str:
    """What is on a device beside the weights."""
    computed, kept = activation_bytes(case.work, case.degrees), max(kept_bytes(case.work, case.degrees))
    if not kept:
        return size_in_words(computed)
    return f"{size_in_words(computed)} and {size_in_words(kept)} of keys and values for patches"


def size_in_words(count: float, rounded: Callable[[float], int] = round) -> str:
    """What is too much is `rounded` up, and what there is down: the two never read alike."""
    unit, name = (GIB, "GiB") if count >= GIB / 10 else (2**20, "MiB")
    return f"{rounded(10 * count / unit) / 10:.1f} {name}"


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
