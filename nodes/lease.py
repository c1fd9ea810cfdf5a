"""A run's lease of the workers: it has them alone, how it is divided among them, and memory for it on their devices.

Whatever asks workers for something asks through one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache

import comfy.model_management
from comfy.model_management import throw_exception_if_processing_interrupted as check_interrupt

from ..parallel_runtime.errors import ParallelError, Refused, WorkerFailed
from ..parallel_runtime.host.choosing import Way, beside, choose, in_words, may_leave_out, ways
from ..parallel_runtime.host.cost import Work, times_as_fast
from ..parallel_runtime.host.group import OnStep, Result, WorkerGroup
from ..parallel_runtime.host.headroom import Shortage, shortage
from ..parallel_runtime.host.history import Size
from ..parallel_runtime.host.planning import Wish, plan
from ..parallel_runtime.host.runtime import runtime
from ..parallel_runtime.host.storing import Case, Prospect, decide, why_whole
from ..parallel_runtime.jobs import Job
from ..parallel_runtime.specs import AfterSampling, Division, ModelSpec, ParallelRequest, Placement, WeightsChoice
from .capacity import LIMIT, capacity_for, let_go, limits_of
from .residence import Held, on_devices
from .workers import comfy_setup

log = logging.getLogger(__name__)

TOKENS_APART = 8  # kinds of work from a number of tokens to twice as many
KEEP = 2  # models that workers hold at once, where there is room: as many as Wan 2.2 samples one video with


@contextmanager
def leased(spec: ModelSpec, placement: Placement, after: AfterSampling = "keep") -> Iterator[Lease]:
    """The workers, which nobody else uses or ends meanwhile; in the end what a user wants is done with the model.
    Raises WorkerStartError."""
    with runtime.borrowed(placement, comfy_setup(), check_interrupt) as group:
        lease = Lease(group, spec)
        try:
            yield lease
        finally:
            if lease.held is not None:
                lease.held.settle(after)


def staffed(spec: ModelSpec, wish: Wish, work: Work) -> Wish:
    """`wish` on the devices that are estimated to do it soonest: where nobody names any all of them meet once, and from
    then on those that would hold the others up are left out. Raises Refused, WorkerStartError."""
    everybody = plan(wish).placement
    if may_leave_out(wish) and everybody.world_size > 1 and runtime.staffing.measured(everybody) is None:
        with leased(spec, everybody):
            pass
    return _ways(spec, wish, work)[1].wish


def foreseen(spec: ModelSpec, wish: Wish, work: Work) -> Foresight:
    """What a run would get at this moment. Raises Refused."""
    found, way = _ways(spec, wish, work)
    free, wish = may_leave_out(wish), way.wish
    placement = plan(wish).placement
    with runtime.resting() as group, suppress(ParallelError):
        if group is not None and group.placement == placement:
            group.measure()
    group = runtime.group
    group = group if group is not None and group.placement == placement else None
    case = _case(group, spec, wish, work, placement)
    division = Division(degrees=case.degrees, placement=placement)
    told = in_words(found, way) if free else in_words(beside(wish, work, case.link, case.capacity))
    return Foresight(request=wish.request, division=division, case=case, group=group, compared=told)


@dataclass(frozen=True, kw_only=True)
class Foresight:
    """How a run would be divided, and what it would go by; the workers, if there are any; what other devices would
    take, in words. `request` names its devices, where auto leaves some out."""

    request: ParallelRequest
    division: Division
    case: Case
    group: WorkerGroup | None
    compared: Sequence[str]


def _ways(spec: ModelSpec, wish: Wish, work: Work) -> tuple[list[Way], Way]:
    """What a run could have, and what it takes of that, as far as anything was measured."""
    everybody, group = plan(wish).placement, runtime.live
    here = group if group is not None and group.placement == everybody else None
    capacity = capacity_for(everybody, here, spec)
    found = ways(wish, work, runtime.staffing.measured(everybody), capacity)
    return found, runtime.staffing.best(found, None if group is None else group.placement)


class Lease:
    """Of the workers of one group, for requests of one model or VAE."""

    def __init__(self, group: WorkerGroup, spec: ModelSpec) -> None:
        self.group = group
        self.spec = spec

    @property
    def held(self) -> Held | None:
        """What its workers have of the model, if it has its place there."""
        return self.group.held.get(self.spec.unpatched)

    def rooms(self) -> tuple[int | None, ...]:
        """What each worker may take of its device at this moment; None: nothing says."""
        self.group.measure(check_interrupt)
        placement = self.group.placement
        return capacity_for(placement, self.group, self.spec).each(placement.world_size)

    def divide(self, wish: Wish, work: Work, before: Held | None = None) -> Division:
        """How the work is divided by what the workers have at this moment: its weights find a place, and there is room
        for both on every device. `before` is what they had of the model earlier in the same run: if they still have it,
        it stays. Raises Refused, with the numbers, before any worker has taken memory."""
        settled = before is not None and before is self.held and self.group.holds(self.spec)
        if not settled:
            self.group.measure(check_interrupt)
        case = _case(self.group, self.spec, wish, work, self.group.placement)
        self.group.activity.of_size(Size(kind_of(self.spec, work), _estimated(case, self.group.placement)))
        if wish.gpus == 1 == self.group.placement.world_size:
            _tell_of_one_gpu()
        way = before.way if before is not None and settled else self._lodged(case, wish.request.weights)
        return Division(degrees=case.degrees, placement=self.group.placement, storage=way.storage, rows=way.rows)

    def run(
        self, division: Division, job: Job, *, room: int | None = None, on_step: OnStep = lambda *_: None
    ) -> Result:
        try:
            return self.group.run(
                self.spec,
                division.degrees,
                job,
                storage=division.storage,
                room=room,
                on_step=on_step,
                watch=check_interrupt,
            )
        except WorkerFailed as failed:
            log.error("[CP] rank %d:\n%s", failed.rank, failed.traceback)
            raise

    def claim(self, way: Prospect, beside: Sequence[int], *, limited: bool = False) -> Shortage | None:
        """Have ComfyUI make room on every device for the weights, and for the bytes that each worker needs `beside`
        them; what is missing after it has let go of others where it must. `limited`: by what a user lets workers have
        of their devices, too."""
        residents, placement = self._placed(way).residents, self.group.placement
        comfy.model_management.soft_empty_cache()  # it counts as free, but workers cannot have it
        for resident, more in zip(residents, on_devices(placement, beside).values(), strict=True):
            comfy.model_management.load_models_gpu([resident], memory_required=more)
        limits = limits_of(placement.world_size) if limited else ()
        if placement.devices[0] == "cpu" and not limits:
            return None
        needed = [held + more for held, more in zip(way.held, beside, strict=True)]
        if lack := self._missing(needed, limits):
            log.info("[CP] %s: ComfyUI lets go of what it can", lack)
            let_go(placement.devices, residents)
            lack = self._missing(needed, limits)
        return lack

    def _placed(self, way: Prospect) -> Held:
        """Its place among what the workers hold, as the last one used; the oldest makes room for it."""
        listed, key = self.group.held, self.spec.unpatched
        held = listed.pop(key, None)
        if held is None or held.way.held != way.held:
            if held is not None:
                held.forget()
            held = Held.by(self.group, key, way)
        held.way = way
        # VAEs take no diffusion model's place.
        alike = [other for other in listed.values() if bool(other.spec.kind) == bool(key.kind)]
        for oldest in alike[: -(KEEP - 1)]:
            oldest.give_back()
        listed[key] = held
        return held

    def _missing(self, needed: Sequence[int], limits: Sequence[int]) -> Shortage | None:
        readings, placement = self.group.measure(check_interrupt), self.group.placement
        of_each = limits or (None,) * placement.world_size
        return shortage(placement, readings, self.spec.title, needed, limits=of_each, limited_by=LIMIT)

    def _lodged(self, case: Case, choice: WeightsChoice) -> Prospect:
        auto = choice == "auto"
        way = self._decided(case, choice)
        lack = self.claim(way, case.beside(way), limited=auto)
        try:
            for _ in self.group.placement.devices if auto else ():
                if lack is None:
                    break
                # ComfyUI had counted on what it could not let go of
                case = replace(case, capacity=case.capacity.at_most(lack.each, lack.ranks, len(case.room)))
                way = self._decided(case, choice)
                lack = self.claim(way, case.beside(way), limited=auto)
            if lack is not None:
                raise Refused(
                    f"{case.work.figures.name} does not fit: {lack}, also after ComfyUI has let go of what it could. "
                    "End what else uses that device, set weights to auto, shard or offload, take more workers, or make "
                    "the picture or video smaller"
                )
        except Refused:
            if self.held is not None:
                self.held.give_back()
            raise
        return way

    def _decided(self, case: Case, choice: WeightsChoice) -> Prospect:
        """Where the weights shall be. Raises Refused where they fit nowhere."""
        way = decide(choice, case, before=self.held.way.storage if self.held else None)
        if why := why_whole(choice, way, case):
            log.info("[CP] %s", why.removesuffix("."))
        if way.rows:
            log.info("[CP] prompts are evaluated one by one: there is no memory for %d together", case.prompts)
        return way


def kind_of(spec: ModelSpec, work: Work) -> tuple[object, ...]:
    """Two runs of one kind take as long on the same workers. A few tokens of text more are no other kind."""
    tokens = round(TOKENS_APART * math.log2(max(1, work.tokens)))
    return spec.unpatched, work.rows, work.prompts, work.cached, tokens


def _estimated(case: Case, placement: Placement) -> float | None:
    """How many times as fast as one worker; None where nobody can say: nothing is cut, or workers share devices."""
    link, cut = case.link, case.work.figures.divisible and case.degrees.pipeline_degree == 1
    known = cut and link is not None and link.bytes_per_second and not placement.shared
    return times_as_fast(case.work, case.degrees, link) if known and link is not None else None


@cache
def _tell_of_one_gpu() -> None:
    log.info(
        "[CP] one GPU: CP Sampler is KSampler to the bit here, and recorded forwards make it faster where the CPU is "
        "too slow for the GPU; sharing one picture takes two GPUs or more"
    )


def _case(group: WorkerGroup | None, spec: ModelSpec, wish: Wish, work: Work, placement: Placement) -> Case:
    """What is known of the workers who are asked, or, where there are none yet, of their devices."""
    link = group.link if group is not None else None
    capacity = capacity_for(placement, group, spec)
    division = choose(wish, work, link, capacity)
    assert division.placement == placement
    degrees = group.balanced(spec, division.degrees, work) if group is not None else division.degrees
    return Case(work=work, degrees=degrees, capacity=capacity, link=link)
