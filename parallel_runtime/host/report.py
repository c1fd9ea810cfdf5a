"""A plan in words that a user understands: what will run where, what it needs, what is wrong and what to do. Each thing
is a row; the text, and the page's table and picture, are made of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..accelerators import CUDA
from ..specs import Division, Parallelism, Placement
from ..wire.readings import Race
from . import shares
from .cost import Link, Work, activation_bytes, bytes_per_layer, evaluation_seconds, of_a_lane
from .devices import why_one_gpu
from .history import Cost, Cut, Pace
from .holdings import memory, needed, placed, weights
from .picture import Part, parts
from .pipelines import Stage, filled, kept_bytes, passed_bytes, stages_of, weight_shares
from .races import told
from .remedy import Change
from .sentences import Said, for_page, listed, say, when
from .storing import Capacity, Case, Prospect, size_in_words

GIB = 2**30
ANYTHING = Capacity()
Kind = Literal["model", "row", "note", "trouble"]


@dataclass(frozen=True)
class Row:
    """One thing that a report says, and whether it is what the plan is for, a part of it, advice, or a refusal."""

    title: str
    sentences: str | tuple[str, ...]
    kind: Kind = "row"

    @property
    def said(self) -> tuple[str, ...]:
        """Each sentence; one that is a Said has words in other languages."""
        found = (self.sentences,) if isinstance(self.sentences, str) else self.sentences
        return tuple(sentence for sentence in found if sentence)

    @property
    def text(self) -> str:
        return " ".join(self.said)

    @property
    def for_page(self) -> list[str | list[Any]]:
        return [for_page(sentence) for sentence in self.said]

    @property
    def line(self) -> str:
        return f"{self.title}: {self.text}" if self.title and self.kind != "model" else self.text


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that is to say, in order, and what each rank holds: nothing where it cannot run as asked. `fix` is what to
    change in CP Parallel Config then; `times` are steps that were measured, `cost` is what it
    takes to measure them anew."""

    rows: tuple[Row, ...]
    parts: tuple[Part, ...] = ()
    fix: tuple[Change, ...] = ()
    times: tuple[Pace, ...] = ()
    cost: Cost | None = None

    @property
    def text(self) -> str:
        return "\n".join(row.line for row in self.rows)

    @property
    def table(self) -> dict[str, list]:
        """Titles with what is said; what is wrong and what is advised stands apart."""
        return {
            "troubles": [row.for_page for row in self.rows if row.kind == "trouble"],
            "rows": [(row.title, row.for_page) for row in self.rows if row.kind in ("model", "row")],
            "notes": [row.for_page for row in self.rows if row.kind == "note"],
        }


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What the plan is for: the model in words, the latent's sizes, and the token count of each stream and of
    the prompt. `together`:
    something on the model sees every prompt and image at once; `compiled`: its blocks are."""

    model: str
    latent: tuple[int, ...]
    tokens: dict[str, int]
    work: Work
    text: int = 0
    together: bool = False
    compiled: bool = False


def report(
    subject: Subject,
    division: Division,
    *,
    guided: bool,
    automatic: bool,
    link: Link | None = None,
    free: Sequence[int] = (),
    capacity: Capacity = ANYTHING,
    way: Prospect | None = None,
    decode: str | tuple[str, ...] = "",
    races: Sequence[Race] = (),
    troubles: Sequence[Row] = (),
    whole: str = "",
    unused: str = "",
    compared: Sequence[str] = (),
    resorted: bool = False,
    warmup: int = 1,
) -> Report:
    """`link` is None where no worker group has measured this machine yet, and nothing is `free` then: the bytes that
    each worker could take of its device at this moment. `capacity` is what the weights found a place by, and `way` that
    place, None where they fit nowhere. `decode` is of a VAE,
    `races` are those of kernels that its workers have run. What was refused, the `troubles`, comes first; `whole` says
    why weights are on every device that were to be elsewhere, `unused` that shares divide nothing, `compared` what
    other devices and degrees would take. `resorted`: auto made it a pipeline. `warmup` steps are exact where others
    come in patches."""
    work, degrees, placement = subject.work, division.degrees, division.placement
    case = Case(work=work, degrees=degrees, capacity=capacity, link=link)
    chosen = _choice(link) if automatic and degrees.context_parallel_size > 1 else "degrees"
    notes = [
        *_warnings(subject, case, placement, guided, free, way),
        whole,
        unused,
        shares.idle(division),
    ]
    rows = [
        *troubles,
        Row("Model", subject.model, "model"),
        Row("Tokens", _tokens(subject.tokens, work.rows)),
        Row("Workers", _workers(placement)),
        Row("Degrees", (say(chosen, degrees=_degrees(degrees)), *_reasons(subject, degrees, guided, way))),
        Row("Shares", (shares.in_words(division), *compared)),
        Row("Stages", (*_stages(work, degrees, resorted), _patches(work, degrees, warmup))),
        Row("Memory", memory(case, placement, free, way)),
        Row("Weights", weights(case, placement, way)),
        Row("Traffic", _traffic(work, degrees)),
        Row("Launch", _launch(subject, division, way)),
        *(Row("Kernel", text) for text in told(races, degrees)),
        Row("Speed", _speed(work, division, link)),
        Row("Decode", decode),
        *(Row("Note", text, "note") for text in notes),
    ]
    of_all = max(1, work.figures.weight_bytes)
    held = [nbytes / of_all if way else 1.0 for nbytes in placed(case, way).held]
    stages = weight_shares(work.figures, degrees)
    shown = [] if troubles else parts(division, sharded=_sharded(way), held=held, stages=stages)
    return Report(rows=tuple(row for row in rows if row.text), parts=tuple(shown))


def _workers(placement: Placement) -> str:
    count, devices = placement.world_size, ", ".join(placement.devices)
    if placement.nnodes == 1:
        return say("workers", count=count, devices=devices)
    machines, endpoint = placement.nnodes, placement.rdzv_endpoint
    return say("workers.machines", count=count, devices=devices, machines=machines, endpoint=endpoint)


def _tokens(tokens: dict[str, int], rows: int) -> str:
    streams = " + ".join(f"{count} {stream}" for stream, count in tokens.items())
    key = ("tokens" if streams else "uncut") + (".one" if rows == 1 else "")
    return say(key, tokens=streams, rows=rows)


def _degrees(degrees: Parallelism) -> str:
    names = ("pipeline_degree", "data_degree", "cfg_degree")
    shown = [name for name in names if getattr(degrees, name) > 1] + ["ring_degree", "ulysses_degree"]
    return " x ".join(f"{name} {getattr(degrees, name)}" for name in shown)


def share_cores(placement: Placement) -> bool:
    """One worker would have all of them; what was measured of several says nothing of it."""
    return placement.devices[0] == "cpu" and len(placement.devices) > 1


def _choice(link: Link | None) -> str:
    """How auto came to the degrees."""
    if link is None or not link.bytes_per_second:
        return "degrees.unmeasured"
    return "degrees.measured"


def _reasons(subject: Subject, degrees: Parallelism, guided: bool, way: Prospect | None) -> list[str]:
    sharded, several = _sharded(way), degrees.context_parallel_size > 1
    how = "ring.collects" if degrees.rotate_method == "allgather" else "ring.passes"
    reasons = [
        when(degrees.cfg_degree == 2, "branches"),
        when(degrees.pipeline_degree > 1, "stages", stages=degrees.pipeline_degree),
        _heads(subject.work, degrees),
        when(degrees.ring_degree > 1, how, workers=degrees.ring_degree),
        when(degrees.data_degree > 1, "images", groups=degrees.data_degree),
        when(not guided and degrees.cfg_degree == 1 and several, "one.prompt"),
        when(guided and sharded and degrees.cfg_degree == 1, "both.parts"),
        when(guided and subject.together and several, "both.seen"),
    ]
    return reasons if any(reasons) else [say("alone")]


def _stages(work: Work, degrees: Parallelism, resorted: bool) -> tuple[str, ...]:
    """Of each stage of a pipeline: its blocks, what they compute, and what they take; how long it stands still; and
    why there is one, if auto made it."""
    if degrees.pipeline_degree == 1 or not (stages := stages_of(work.figures, degrees)):
        return ()
    each = [_stage(number, stage) for number, stage in enumerate(stages, 1)]
    flights, busy = of_a_lane(work, degrees), f"{filled(work, degrees):.0%}"
    follow = say("stage.several" if flights > 1 else "stage.one", flights=flights, busy=busy)
    exact, auto = when(degrees.patches == 1, "stage.exact"), when(resorted, "stage.auto")
    return say("stage.all", stages=listed(each, "stage.and")), follow, exact, auto


def _stage(number: int, stage: Stage) -> Said:
    blocks = {"first": stage.first + 1, "last": stage.first + stage.count}
    return say("stage", number=number, **blocks, work=f"{stage.work:.0%}", size=size_in_words(stage.nbytes))


def _patches(work: Work, degrees: Parallelism, warmup: int) -> str:
    if degrees.patches == 1:
        return ""
    kept = f"{max(kept_bytes(work, degrees)) / GIB:.2f}"
    return say("stages.patches", patches=degrees.patches, warmup=warmup, kept=kept)


def _sharded(way: Prospect | None) -> bool:
    return way is not None and way.storage.mode == "shard"


def _heads(work: Work, degrees: Parallelism) -> str:
    workers = degrees.ulysses_degree
    if workers == 1:
        return ""
    least, more = divmod(work.figures.heads, workers)
    if len(set(degrees.shares)) > 1:
        return say("heads.shares", workers=workers)
    if more:
        return say("heads.or", workers=workers, heads=least, more=least + 1)
    return say("heads.one" if least == 1 else "heads", workers=workers, heads=least)


def _traffic(work: Work, degrees: Parallelism) -> tuple[str, ...]:
    """In the model, and from stage to stage of a pipeline."""
    each = f"{passed_bytes(work) / degrees.context_parallel_size / 2**20:.2f}"
    passed = when(degrees.pipeline_degree > 1, "traffic.stages", each=each)
    if degrees.context_parallel_size == 1:
        return (passed or say("traffic.none"),)
    layer, layers = bytes_per_layer(work, degrees) / 2**20, work.figures.layers
    return say("traffic", layer=f"{layer:.2f}", layers=layers, evaluation=f"{layer * layers:.1f}"), passed


def _launch(subject: Subject, division: Division, way: Prospect | None) -> str:
    """Where GPUs could be led by the host."""
    choice, work = division.degrees.cuda_graphs, subject.work
    if not division.placement.devices[0].startswith(CUDA.kind):
        return ""
    if division.degrees.pipeline_degree > 1:
        return say("launch.stages")
    if choice == "off" or not work.recorded or (way is not None and way.fetched_bytes):
        return say("launch.eager")
    key = f"launch.{choice}{'.compiled' if subject.compiled else ''}"
    return say(key, held=f"{activation_bytes(work, division.degrees) / GIB:.2f}")


def _speed(work: Work, division: Division, link: Link | None) -> str:
    if link is None or not link.bytes_per_second:
        return ""
    degrees = division.degrees
    several, alone = (evaluation_seconds(work, cut, link) for cut in (degrees, Parallelism()))
    times = Cut.of(degrees, division.placement).credible(alone / several) if several else None
    if times is None:
        return ""
    lanes = degrees.cfg_degree * degrees.data_degree
    measured = {"link": f"{link.bytes_per_second / 1e9:.1f}", "flops": f"{link.flops_per_second / 1e12:.1f}"}
    return say("speed.lanes" if lanes > 1 else "speed", times=f"{times:.2f}", lanes=lanes, **measured)


def _warnings(
    subject: Subject, case: Case, placement: Placement, guided: bool, free: Sequence[int], way: Prospect | None
) -> list[str]:
    work, degrees, on_cpu = case.work, case.degrees, placement.devices[0] == "cpu"
    heads, ulysses = work.figures.heads, degrees.ulysses_degree
    lacking = any(size > room for size, room in zip(needed(case, way), free, strict=False))
    one_gpu = why_one_gpu(1) if placement.devices == ("cuda:0",) else ""
    standing_still = degrees.pipeline_degree > of_a_lane(work, degrees) * degrees.patches
    return [
        when(lacking, "note.memory"),
        when(way is not None and way.rows and guided, "note.rows"),
        when(heads % ulysses, "note.uneven", heads=heads, ulysses=ulysses),
        when(share_cores(placement), "note.cores", workers=len(placement.devices), cores=os.cpu_count()),
        when(placement.shared and not on_cpu, "note.twice"),
        f"{one_gpu}." if one_gpu else "",
        _untried(placement),
        _of_prompts(subject, degrees, way) if guided else "",
        when(standing_still, "note.stages", idle=f"{1 - filled(work, degrees):.0%}"),
        _of_rows(subject, degrees),
    ]


def _untried(placement: Placement) -> str:
    """What of this placement nobody has run."""
    kind = placement.devices[0].partition(":")[0]
    if kind == "cpu":
        return ""
    if placement.nnodes > 1:
        return say("untried.machines")
    if kind != "cuda":
        return say("untried.kind", kind=kind)
    return when(len(set(placement.devices)) > 1, "untried.several")


def _of_prompts(subject: Subject, degrees: Parallelism, way: Prospect | None) -> str:
    if _sharded(way) and degrees.cfg_degree > 1:
        return say("note.halves")
    even = degrees.cfg_degree == 1 and degrees.context_parallel_size % 2 == 0
    in_parts = way is not None and way.storage.mode != "replicate"
    return when(even and not in_parts and not subject.together, "note.branches")


def _of_rows(subject: Subject, degrees: Parallelism) -> str:
    work, data = subject.work, degrees.data_degree
    if subject.together and data > 1:
        return say("note.together", data=data)
    if data <= work.rows:
        return ""
    if not work.figures.divisible:
        return say("note.undivided", name=work.figures.name)
    return say("note.idle", data=data, rows=work.rows)
