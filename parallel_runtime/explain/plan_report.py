"""Puts a plan into words for its user: what will run where, what it needs, what is wrong and what to do. Each thing is
a row; the text, and the page's table and picture, are made of them."""

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..accelerators import CUDA
from ..errors import listed, say, say_if, to_json
from ..group.history import Pace, RunSetup
from ..planning.memory_model import GIB, estimate_activation_bytes, size_in_words
from ..planning.network_stats import Work
from ..planning.resolve import MIN_GAIN_TO_SWITCH, evaluate
from ..planning.run_plan import DeviceProfile, PlanInputs, RunPlan
from ..planning.seconds import attention_bytes, evaluation_seconds
from ..request import ParallelRequest, why_one_gpu
from ..specs import Parallelism, Placement, WeightPlacement
from .plan_words import Part, memory, parts, unused, weights, why_replicated

Kind = Literal["model", "row", "note", "trouble", "text"]

# Root mean square of how far the demo's latent was from one worker's, by its standard deviation: five steps over two
# CPU workers of Ulysses, and of a ring, where a rank's own keys stay as they are.
FLOAT8_ERROR, FLOAT8_RING_ERROR = 0.014, 0.004


@dataclass(frozen=True)
class Row:
    """One row of a report: the model, a part of the plan, advice ("note"), a refusal ("trouble"), or what only the text
    has ("text"): the page shows it as a picture."""

    title: str
    sentences: str | tuple[str, ...]
    kind: Kind = "row"

    @property
    def text(self) -> str:
        return " ".join(self._nonempty)

    @property
    def for_page(self) -> list[Any]:
        """Returns the sentences as JSON; a Sentence can be translated."""
        return [to_json(sentence) for sentence in self._nonempty]

    @property
    def line(self) -> str:
        return f"{self.title}: {self.text}" if self.title and self.kind != "model" else self.text

    @property
    def _nonempty(self) -> list[str]:
        return [text for text in ((self.sentences,) if isinstance(self.sentences, str) else self.sentences) if text]


@dataclass(frozen=True, kw_only=True)
class Report:
    """All rows in order, and the parts of each rank, none where it cannot run as requested."""

    rows: tuple[Row, ...]
    parts: tuple[Part, ...] = ()

    @property
    def text(self) -> str:
        return "\n".join(row.line for row in self.rows)

    @property
    def table(self) -> dict[str, list]:
        """Returns the rows as JSON for the page, refusals and advice apart from the others."""
        return {
            "troubles": [row.for_page for row in self.rows if row.kind == "trouble"],
            "rows": [(row.title, row.for_page) for row in self.rows if row.kind in ("model", "row")],
            "notes": [row.for_page for row in self.rows if row.kind == "note"],
        }


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The subject of a plan: the model in words, the latent's sizes, and the token count of each stream and of the
    prompt. `batch_coupled`: something on the model sees every prompt and image at once; `compiled`: its blocks are.
    `controls` says where its ControlNets run, `loop` why the loop stays in ComfyUI's process."""

    model: str
    latent: tuple[int, ...]
    tokens: dict[str, int]
    work: Work
    text: int = 0
    batch_coupled: bool = False
    compiled: bool = False
    controls: str = ""
    loop: str = ""


def report(
    subject: Subject, plan: RunPlan, inputs: PlanInputs, *, free: Sequence[int] = (),
    decode: str | tuple[str, ...] = "", encode: tuple[str, ...] = (), pace: Pace | None = None,
    paces: Sequence[Pace] = (), troubles: Sequence[Row] = (), compared: Sequence[str] = (),
) -> Report:  # fmt: skip
    """Returns the report on the `plan` of these inputs, which has no estimate where its weights fit nowhere. `free` are
    the bytes that each worker could take of its device at this moment, () where none has measured. `decode` has the
    sentences on a VAE, `encode` those on a text encoder, `pace` is that of a run of this plan, `paces` are
    all that were measured. Refusals, the `troubles`, come first; `compared` says how long other devices and degrees
    would take."""
    work, degrees, placement, request = subject.work, plan.degrees, plan.placement, inputs.request
    profile, capacity = inputs.profile_of(plan), inputs.capacity.of(plan.ranks)
    measured = profile is not None and profile.bytes_per_second > 0
    by_auto = "degrees.measured" if measured else "degrees.unmeasured"
    chosen = by_auto if inputs.sequence_degrees_open and degrees.context_parallel_size > 1 else "degrees"
    replicated = replace(plan, weights=WeightPlacement(), entries_per_call=0)
    estimate = plan.estimate or evaluate(replicated, inputs)
    shares = ", ".join(f"{device} {percent} %" for device, percent in plan.work_percent)
    devices = placement.devices * placement.nnodes
    workless = [device for device, share in zip(devices, degrees.shares, strict=False) if not share]
    notes = [
        *_warnings(subject, plan, inputs, estimate.needed_bytes_by_rank, free),
        why_replicated(request, plan, work.network) if plan.estimate else "",
        _of_batch(work, plan, profile),
        unused(request, plan, work.network.name),
        say_if(workless, "note.workless", devices=", ".join(workless)),
    ]
    rows = [
        *troubles,
        Row("Speed", (_measured_speed(pace), _speed(work, plan, profile))),
        Row("Speed", tuple(_measured_speed(one) for one in paces if one is not pace), "text"),
        Row("Model", subject.model, "model"),
        Row("Tokens", _tokens(subject.tokens, work.sequences)),
        Row("ControlNets", subject.controls),
        Row("Loop", subject.loop),
        Row("Workers", _workers(placement)),
        Row("Degrees", (say(chosen, degrees=_degrees(degrees)), *_reasons(subject, plan, inputs.guided))),
        Row("Shares", (say_if(len(set(degrees.shares)) > 1, "shares", shares=shares), *compared)),
        Row("Stages", _stages(work, degrees, request)),
        Row("Memory", memory(estimate, placement, free)),
        Row("Weights", weights(plan, work, capacity)),
        Row("Traffic", _traffic(work, degrees, profile)),
        Row("Launch", _launch(subject, plan)),
        Row("Encoder", encode),
        Row("Decode", decode),
        *(Row("Note", text, "note") for text in notes),
    ]
    total = max(1, work.network.weight_bytes)
    fractions = [nbytes / total if plan.estimate else 1.0 for nbytes in estimate.weight_bytes_by_rank]
    shown = [] if troubles else parts(plan, weights=fractions, stages=work.network.weight_ranges(degrees))
    return Report(rows=tuple(row for row in rows if row.text), parts=tuple(shown))


def _workers(placement: Placement) -> str:
    count = placement.world_size
    named = Counter(placement.devices).items()
    devices = ", ".join(device if times == 1 else f"{times} x {device}" for device, times in named)
    if placement.nnodes == 1:
        return say("workers", devices=devices)
    machines, endpoint = placement.nnodes, placement.rdzv_endpoint
    return say("workers.machines", count=count, devices=devices, machines=machines, endpoint=endpoint)


def _tokens(tokens: dict[str, int], sequences: int) -> str:
    streams = " + ".join(f"{count} {stream}" for stream, count in tokens.items())
    key = ("tokens" if streams else "uncut") + (".one" if sequences == 1 else "")
    return say(key, tokens=streams, rows=sequences)


def _degrees(degrees: Parallelism) -> str:
    names = ("pipeline_degree", "data_degree", "cfg_degree")
    shown = [name for name in names if getattr(degrees, name) > 1] + ["ring_degree", "ulysses_degree"]
    return " x ".join(f"{name} {getattr(degrees, name)}" for name in shown)


def share_cores(placement: Placement) -> bool:
    """Do several workers share the cores of a CPU? Then their measurements say nothing of one worker."""
    return placement.device_kind == "cpu" and len(placement.devices) > 1


RING_SENTENCES = {"alltoall": "ring.passes", "allgather": "ring.collects", "tokens": "ring.tokens"}


def _reasons(subject: Subject, plan: RunPlan, guided: bool) -> list[str]:
    degrees, sharded, several = plan.degrees, plan.sharded, plan.degrees.context_parallel_size > 1
    how, no_lse = RING_SENTENCES[degrees.options.rotate_method], subject.work.network.no_lse
    ulysses = degrees.ulysses_degree
    least, more = divmod(subject.work.network.heads, ulysses)
    if len(set(degrees.shares)) > 1:
        heads = say("heads.shares", workers=ulysses)
    elif more:
        heads = say("heads.or", workers=ulysses, heads=least, more=least + 1)
    else:
        heads = say("heads.one" if least == 1 else "heads", workers=ulysses, heads=least)
    reasons = [
        say_if(degrees.cfg_degree == 2, "branches"),
        say_if(degrees.pipeline_degree > 1, "stages", stages=degrees.pipeline_degree),
        heads if ulysses > 1 else "",
        say_if(degrees.ring_degree > 1, how, workers=degrees.ring_degree),
        say_if(several and bool(no_lse), "ring.none", attention=no_lse),
        say_if(degrees.data_degree > 1, "images", groups=degrees.data_degree),
        say_if(not guided and degrees.cfg_degree == 1 and several, "one.prompt"),
        say_if(guided and sharded and degrees.cfg_degree == 1, "both.parts"),
        say_if(guided and subject.batch_coupled and several, "both.seen"),
    ]
    return reasons if any(reasons) else [say("alone")]


def _stages(work: Work, degrees: Parallelism, request: ParallelRequest) -> tuple[str, ...]:
    """Says of each stage its blocks, work and size, how long stages idle, why auto made a pipeline, and what token
    patches keep."""
    if degrees.pipeline_degree == 1 or not (stages := work.network.stages(degrees)):
        return ()
    each = []
    for number, stage in enumerate(stages, 1):
        blocks = {"first": stage.first + 1, "last": stage.first + stage.count}
        size = size_in_words(stage.nbytes)
        each.append(say("stage", number=number, **blocks, work=f"{stage.work:.0%}", size=size))
    flights, busy = work.most_sequences(degrees), f"{work.busy_share(degrees):.0%}"
    patches, kept = degrees.options.token_patches, f"{max(work.cached_bytes_by_rank(degrees)) / GIB:.2f}"
    return (
        say("stage.all", stages=listed(each, "stage.and")),
        say("stage.several" if flights > 1 else "stage.one", flights=flights, busy=busy),
        say_if(patches == 1, "stage.exact"),
        say_if(request.pipeline_degree == 0, "stage.auto"),
        say_if(patches > 1, "stages.patches", patches=patches, warmup=request.options.warmup_steps, kept=kept),
    )


def _traffic(work: Work, degrees: Parallelism, profile: DeviceProfile | None) -> tuple[str, ...]:
    """Says what is sent in the model, and from stage to stage of a pipeline; and what sending in float8 gains by the
    estimate, and what it cost where it was measured."""
    ranks, dtype = degrees.context_parallel_size, degrees.options.comm_dtype
    passed = say_if(degrees.pipeline_degree > 1, "traffic.stages", each=f"{work.sequence_bytes / ranks / 2**20:.2f}")
    sentences: list[str] = [passed or say("traffic.none")]
    if ranks > 1 and not 0 < work.row_ranks < ranks:
        layer, layers = attention_bytes(work, degrees) / 2**20, work.network.layers
        evaluation = f"{layer * layers:.1f}"
        sentences = [say("traffic", layer=f"{layer:.2f}", layers=layers, evaluation=evaluation), passed]
    if not degrees.options.sends_float8:
        return tuple(sentences)
    exact = degrees.with_options(comm_dtype="same")
    sent = attention_bytes(work, exact)
    if not sent:
        return *sentences, say("float8.nothing", dtype=dtype)
    percent = f"{attention_bytes(work, degrees) / sent:.0%}"
    error = f"{FLOAT8_ERROR if degrees.ulysses_degree > 1 else FLOAT8_RING_ERROR:.1%}"
    if profile is None or not profile.bytes_per_second:
        return *sentences, say("float8", dtype=dtype, percent=percent, error=error)
    times = evaluation_seconds(work, exact, profile) / evaluation_seconds(work, degrees, profile)
    return *sentences, say("float8.times", times=f"{times:.2f}", dtype=dtype, percent=percent, error=error)


def _launch(subject: Subject, plan: RunPlan) -> str:
    """Says how GPU work is launched: eagerly, or as a recorded CUDA graph."""
    choice, work = plan.degrees.options.cuda_graphs, subject.work
    if plan.placement.device_kind != CUDA.kind:
        return ""
    if plan.degrees.pipeline_degree > 1:
        return say("launch.stages")
    if choice == "off" or not work.recorded or (plan.estimate is not None and plan.estimate.fetched_bytes):
        return say("launch.eager")
    key = f"launch.{choice}{'.compiled' if subject.compiled else ''}"
    return say(key, size=f"{max(estimate_activation_bytes(work, plan.degrees)) / GIB:.2f}")


def _measured_speed(pace: Pace | None) -> str:
    """Returns the seconds per step of this plan, and the speedup, as measured here."""
    if pace is None:
        return ""
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(pace.at))
    values = {"workers": pace.setup.workers, "seconds": f"{pace.seconds:.2f}", "at": at}
    if pace.speedup is None:
        return say("speed.measured", **values)
    return say("speed.measured.times", times=f"{pace.speedup:.1f}", **values)


def _speed(work: Work, plan: RunPlan, profile: DeviceProfile | None) -> str:
    if profile is None or not profile.bytes_per_second:
        return ""
    degrees = plan.degrees
    group = replace(degrees, cfg_degree=1, data_degree=1, shares=())
    several, on_one = (evaluation_seconds(work, each, profile) for each in (group, Parallelism()))
    times = RunSetup.of(degrees, plan.placement).plausible_speedup(on_one / several) if several else None
    if times is None:
        return ""
    groups = degrees.cfg_degree * degrees.data_degree
    measured = {"link": f"{profile.bytes_per_second / 1e9:.1f}", "flops": f"{profile.flops_per_second / 1e12:.1f}"}
    return say("speed.groups" if groups > 1 else "speed", times=f"{times:.2f}", groups=groups, **measured)


def _warnings(
    subject: Subject, plan: RunPlan, inputs: PlanInputs, needed: Sequence[int], free: Sequence[int]
) -> list[str]:
    work, network, degrees, placement = subject.work, subject.work.network, plan.degrees, plan.placement
    heads, ulysses, ranks = network.heads, degrees.ulysses_degree, degrees.context_parallel_size
    data, rows, workers, kind = degrees.data_degree, work.sequences, degrees.world_size, placement.device_kind
    lacking = any(size > available for size, available in zip(needed, free, strict=False))
    one_gpu = why_one_gpu(1) if placement.devices == ("cuda:0",) else ""
    stages_idle = degrees.pipeline_degree > work.most_sequences(degrees) * degrees.options.token_patches
    one_cuda = kind == "cuda" and placement.nnodes == 1
    halves = plan.sharded and degrees.cfg_degree > 1
    branches = degrees.cfg_degree == 1 and ranks % 2 == 0 and plan.weights.mode == "replicate"
    together = subject.batch_coupled and data > 1
    frames = network.images_coupled and data > 1 and not together
    alike = data > rows and not (together or frames)  # some groups compute what others do
    by_auto = not inputs.request.data_degree
    return [
        say_if(degrees.options.step_cache, "note.cache", threshold=degrees.options.step_cache),
        say_if(lacking, "note.memory"),
        say_if(plan.entries_per_call and inputs.guided, "note.rows"),
        say_if(heads % ulysses, "note.uneven", heads=heads, ulysses=ulysses),
        say_if(ranks > work.row_ranks > 0, "note.fewrows", name=network.name, rows=work.row_ranks, workers=ranks),
        say_if(share_cores(placement), "note.cores", workers=len(placement.devices), cores=os.cpu_count()),
        say_if(placement.shared and kind != "cpu", "note.twice"),
        f"{one_gpu}." if one_gpu else "",
        # What nobody has tested yet.
        say_if(kind != "cpu" and placement.nnodes > 1, "untried.machines"),
        say_if(kind not in ("cpu", "cuda") and placement.nnodes == 1, "untried.kind", kind=kind),
        say_if(one_cuda and len(set(placement.devices)) > 1, "untried.several"),
        say_if(inputs.guided and halves, "note.halves"),
        say_if(inputs.guided and branches and not subject.batch_coupled, "note.branches"),
        say_if(stages_idle, "note.stages", idle=f"{1 - work.busy_share(degrees):.0%}"),
        say_if(together, "note.together", data=data),
        say_if(frames, "note.frames", data=data),
        say_if(alike and not network.divisible, "note.undivided", name=network.name),
        say_if(alike and network.divisible and by_auto, "note.fewer", workers=workers, each=workers // data),
        say_if(alike and network.divisible and not by_auto, "note.idle", data=data, rows=rows),
    ]


def _of_batch(work: Work, plan: RunPlan, profile: DeviceProfile | None) -> str:
    """Says when images of a batch are faster as whole images, shared out by data_degree; "" when they are not."""
    degrees, workers = plan.degrees, plan.placement.world_size
    data = max(size for size in range(1, min(workers, work.sequences) + 1) if workers % size == 0)
    if profile is None or not profile.bytes_per_second:
        return ""
    if data == 1 or degrees.data_degree * degrees.pipeline_degree > 1:
        return ""
    if work.network.heads % (workers // data) and not work.network.row_levels:
        return ""
    shared = Parallelism(data_degree=data, ulysses_degree=workers // data)
    now = evaluation_seconds(work, degrees, profile) * -(-work.branches // degrees.cfg_degree)
    other = evaluation_seconds(work, shared, profile) * work.branches
    faster = other < MIN_GAIN_TO_SWITCH * now and not plan.placement.shared
    return say_if(faster, "note.batch", rows=work.sequences, data=data, other=f"{other:.2f}", seconds=f"{now:.2f}")
