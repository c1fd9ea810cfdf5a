"""What workers hold of a model and need beside it, each where that is not alike, and why, for CP Plan."""

from __future__ import annotations

from collections.abc import Sequence

from ..specs import Parallelism, Placement, Storage
from .cost import Work
from .pipelines import held_bytes, outside_bytes
from .sentences import say
from .storing import GIB, Case, Prospect, size_in_words


def memory(case: Case, placement: Placement, free: Sequence[int], way: Prospect | None) -> tuple[str, str]:
    """At the peak; `way` is None where the weights have no place."""
    each, held = needed(case, way), max(placed(case, way).held)
    told = {"needed": f"{max(each) / GIB:.2f}", "held": f"{held / GIB:.2f}"}
    most = say("memory", **told, free=f"{min(free) / GIB:.2f}") if free else say("memory.unknown", **told)
    return most, _memory_of_each(placement, each, free) if len(set(each)) > 1 else ""


def placed(case: Case, way: Prospect | None) -> Prospect:
    """Whole weights where there is no place for them."""
    return way or Prospect(storage=Storage(), held=held_bytes(case.work.figures, case.degrees))


def needed(case: Case, way: Prospect | None) -> tuple[int, ...]:
    """By each worker, at its peak."""
    return case.needed(placed(case, way))


def weights(case: Case, placement: Placement, way: Prospect | None) -> tuple[str, ...]:
    """Of each worker: what it has, what it fetches, and what it waits for that."""
    work, degrees = case.work, case.degrees
    if way is None:
        return ()
    if degrees.pipeline_degree > 1:
        return (say("weights.stages", outside=size_in_words(outside_bytes(work.figures))),)
    if not way.fetched_bytes:
        return (say("weights.whole", mode=way.storage.mode),)
    mode = way.storage.mode
    told = {"mode": mode, "workers": degrees.context_parallel_size, "fetched": f"{way.fetched_bytes / GIB:.2f}"}
    source = "weights.fetched" if mode == "offload" else "weights.gathered"
    if len(set(way.held)) > 1:
        said = say(f"{source}.each", each=_weights_of_each(case, way, placement), **told)
    else:
        held, blocks = f"{max(way.held) / GIB:.2f}", len(work.figures.blocks)
        said = say(source, resident=way.storage.resident, blocks=blocks, held=held, **told)
    return said, _why_elsewhere(case, way, placement), _fetching(work, degrees, way)


def _fetching(work: Work, degrees: Parallelism, way: Prospect) -> str:
    if not way.seconds:
        return say("weights.unmeasured")
    prompts = 1 if way.rows else -(-work.prompts // degrees.cfg_degree)
    key = ("weights.waits" if way.exposed else "weights.hidden") + (".one" if prompts == 1 else "")
    return say(key, seconds=f"{way.seconds:.2f}", prompts=prompts, exposed=f"{way.exposed:.2f}")


def _weights_of_each(case: Case, way: Prospect, placement: Placement) -> str:
    """Which each has at rest, and of how many blocks."""
    blocks, told = len(case.blocks), []
    for rank, (device, held) in enumerate(zip(placement.each, way.held, strict=True)):
        told.append(f"{device} {size_in_words(held)} ({way.storage.resident_on(rank)}/{blocks})")
    return ", ".join(told)


def _why_elsewhere(case: Case, way: Prospect, placement: Placement) -> str:
    """Which devices whole weights would fit, and which not; "" where they are whole, or fit all or none."""
    whole = case.one_by_one
    each = zip(placement.each, case.room, whole.needed(whole.prospect(Storage())), strict=True)
    rooms = list(each)
    fitting = [device for device, room, needed in rooms if room is None or needed <= room]
    if not way.fetched_bytes or len(fitting) in (0, len(rooms)):
        return ""
    device, room, needed = next(one for one in rooms if one[1] is not None and one[2] > one[1])
    sizes = {"needed": size_in_words(needed), "room": size_in_words(room or 0)}
    return say("weights.why", fitting=", ".join(fitting), device=device, **sizes)


def _memory_of_each(placement: Placement, needed: Sequence[int], free: Sequence[int]) -> str:
    """What each needs at its peak, of what is free."""
    told = [f"{device} {size_in_words(size)}" for device, size in zip(placement.each, needed, strict=True)]
    if not free:
        return say("memory.each.unknown", each=", ".join(told))
    each = (f"{one} / {size_in_words(room)}" for one, room in zip(told, free, strict=True))
    return say("memory.each", each=", ".join(each))
