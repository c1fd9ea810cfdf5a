"""A plan in words that a user understands: what will run where, what it needs, what is wrong and what to do. Each thing
is a row; the text, and the page's table and picture, are made of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..accelerators import CUDA
from ..specs import Division, Parallelism, Placement
from ..wire.readings import Race
from . import shares
from .cost import Link, Work, activation_bytes, bytes_per_layer, evaluation_seconds, memory_bytes
from .devices import why_one_gpu
from .picture import Part, parts
from .pipelines import filled, in_flight, outside_bytes, passed_bytes, stages_of, weight_shares
from .races import told
from .storing import BUFFERS, Prospect, size_in_words

GIB = 2**30
WHY = " Auto's choice: the weights have no other place without being fetched over a slow link."
Kind = Literal["model", "row", "note", "trouble"]


@dataclass(frozen=True)
class Row:
    """One thing that a report says, and whether it is what the plan is for, a part of it, advice, or a refusal."""

    title: str
    text: str
    kind: Kind = "row"

    @property
    def line(self) -> str:
        return f"{self.title}: {self.text}" if self.title and self.kind != "model" else self.text


@dataclass(frozen=True, kw_only=True)
class Report:
    """All that is to say, in order, and what each rank holds: nothing where the MODEL cannot run in the workers."""

    rows: tuple[Row, ...]
    parts: tuple[Part, ...] = ()

    @property
    def text(self) -> str:
        return "\n".join(row.line for row in self.rows)

    @property
    def table(self) -> dict[str, list]:
        """Titles with their texts; what is wrong and what is advised stands apart."""
        return {
            "troubles": [row.text for row in self.rows if row.kind == "trouble"],
            "rows": [(row.title, row.text) for row in self.rows if row.kind in ("model", "row")],
            "notes": [row.text for row in self.rows if row.kind == "note"],
        }


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What the plan is for: the model in words, the latent's sizes, and the token count of each stream. `together`:
    something on the model sees every prompt and image at once; `compiled`: its blocks are."""

    model: str
    latent: tuple[int, ...]
    tokens: dict[str, int]
    work: Work
    together: bool = False
    compiled: bool = False


def report(
    subject: Subject,
    division: Division,
    *,
    guided: bool,
    automatic: bool,
    link: Link | None = None,
    free: int | None = None,
    way: Prospect | None = None,
    decode: str = "",
    races: Sequence[Race] = (),
    troubles: Sequence[Row] = (),
    whole: str = "",
    resorted: bool = False,
) -> Report:
    """`link` is None where no worker group has measured this machine yet, and so is `free`, the bytes that the worker
    with the least could take of its device at this moment; `way` where the weights fit nowhere. `decode` is of a VAE,
    `races` are those of kernels that its workers have run. What was refused, the `troubles`, comes first; `whole` says
    why weights are on every device that were to be elsewhere. `resorted`: auto made it a pipeline."""
    work, degrees, placement = subject.work, division.degrees, division.placement
    chosen = _choice(link) if automatic and degrees.context_parallel_size > 1 else ""
    notes = [
        *_warnings(subject, degrees, placement, guided, free, way),
        f"{whole}." if whole else "",
        shares.idle(division),
    ]
    rows = [
        *troubles,
        Row("Model", subject.model, "model"),
        Row("Tokens", f"{_tokens(subject.tokens) or 'not cut'}; {work.rows} image(s) or video(s) in the batch."),
        Row("Workers", f"{placement.world_size}, on {', '.join(placement.devices)}{_machines(placement)}."),
        Row("Degrees", f"{_degrees(degrees)}{chosen}. {_reason(subject, degrees, guided, way)}"),
        Row("Shares", shares.in_words(division)),
        Row("Stages", _stages(work, degrees, resorted)),
        Row("Memory", _memory(work, degrees, free, way)),
        Row("Weights", _weights(work, degrees, way)),
        Row("Traffic", _traffic(work, degrees)),
        Row("Launch", _launch(subject, division, way)),
        *(Row("Kernel", text) for text in told(races, degrees)),
        Row("Speed", _speed(work, degrees, link) if not share_cores(placement) else ""),
        Row("Decode", decode),
        *(Row("Note", text, "note") for text in notes),
    ]
    held = way.held_bytes / max(1, work.figures.weight_bytes) if way is not None else 1.0
    shown = parts(division, sharded=_sharded(way), held=held, stages=weight_shares(work.figures, degrees))
    return Report(rows=tuple(row for row in rows if row.text), parts=tuple(shown))


def _machines(placement: Placement) -> str:
    if placement.nnodes == 1:
        return ""
    return f" of each of {placement.nnodes} machines, which meet at {placement.rdzv_endpoint}"


def _tokens(tokens: dict[str, int]) -> str:
    return " + ".join(f"{count} {stream}" for stream, count in tokens.items())


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
        return ", auto's choice until as many workers have run here and measured"
    return ", the fastest by what the workers measured"


def _reason(subject: Subject, degrees: Parallelism, guided: bool, way: Prospect | None) -> str:
    work, reasons = subject.work, []
    if degrees.cfg_degree == 2:
        reasons.append("Positive and negative prompt run side by side, which exchanges one latent a step.")
    if degrees.pipeline_degree > 1:
        reasons.append(
            f"A pipeline: each of {degrees.pipeline_degree} stages has a part of the blocks, and passes the tokens on."
        )
    if degrees.ulysses_degree > 1:
        reasons.append(f"Ulysses gives each of {degrees.ulysses_degree} workers {_share(work, degrees)} heads.")
    if degrees.ring_degree > 1:
        how = (
            "collects keys and values of all {} workers before they compute"
            if degrees.rotate_method == "allgather"
            else "passes keys and values between {} workers while they compute"
        )
        reasons.append(f"The ring {how.format(degrees.ring_degree)}.")
    if degrees.data_degree > 1:
        reasons.append(f"The images of a batch are shared out over {degrees.data_degree} groups of workers.")
    if not guided and degrees.cfg_degree == 1 and degrees.context_parallel_size > 1:
        reasons.append("At cfg 1 there is one prompt, so all workers share its tokens.")
    if guided and _sharded(way) and degrees.cfg_degree == 1:
        reasons.append("All workers have both prompts, and each keeps a part of the weights.")
    if guided and subject.together and degrees.context_parallel_size > 1:
        reasons.append("Something on MODEL sees both prompts at once, so all workers share the tokens of both.")
    return " ".join(reasons) or "One worker does everything."


def _stages(work: Work, degrees: Parallelism, resorted: bool) -> str:
    """Of each stage of a pipeline: its blocks, what they compute, and what they take; how long it stands still; and
    why there is one, if auto made it."""
    if degrees.pipeline_degree == 1 or not (stages := stages_of(work.figures, degrees)):
        return ""
    each = (
        f"{number} has blocks {stage.first + 1} to {stage.first + stage.count} ({stage.work:.0%} of the work, "
        f"{size_in_words(stage.nbytes)})"
        for number, stage in enumerate(stages, 1)
    )
    flights = in_flight(work, degrees)
    follow = f"{flights} evaluations follow each other" if flights > 1 else "one evaluation goes"
    busy = f"a stage computes {filled(work, degrees):.0%} of the time"
    return f"{'; '.join(each)}. {follow} through them: {busy}. Exact.{WHY if resorted else ''}"


def _sharded(way: Prospect | None) -> bool:
    return way is not None and way.storage.mode == "shard"


def _share(work: Work, degrees: Parallelism) -> str:
    if len(set(degrees.shares)) > 1:
        return "its share of the"
    least, more = divmod(work.figures.heads, degrees.ulysses_degree)
    return f"{least} or {least + 1}" if more else str(least)


def _memory(work: Work, degrees: Parallelism, free: int | None, way: Prospect | None) -> str:
    held = way.held_bytes if way else work.figures.weight_bytes
    text = f"about {_needed(work, degrees, way) / GIB:.2f} GiB a worker, {held / GIB:.2f} of it weights"
    if free is None:
        return f"{text}. What is free is known once workers run."
    return f"{text}; the fullest has {free / GIB:.2f} GiB free now."


def _needed(work: Work, degrees: Parallelism, way: Prospect | None) -> int:
    """By one worker, at its peak."""
    if way is not None and way.rows:
        work = replace(work, prompts=1)
    if way is None or not way.fetched_bytes:
        return memory_bytes(work, degrees)
    return way.held_bytes + BUFFERS * max(work.figures.blocks) + activation_bytes(work, degrees)


def _weights(work: Work, degrees: Parallelism, way: Prospect | None) -> str:
    """Of each worker: what it has, what it fetches, and what it waits for that."""
    if way is None:
        return ""
    if degrees.pipeline_degree > 1:
        outside = size_in_words(outside_bytes(work.figures))
        return f"each stage has its own blocks alone, and the {outside} that lie outside of blocks."
    if not way.fetched_bytes:
        return f"{way.storage.mode}, whole on every device."
    blocks, resident = len(work.figures.blocks), way.storage.resident
    source = "main memory" if way.storage.mode == "offload" else f"{degrees.context_parallel_size} workers"
    text = (
        f"{way.storage.mode}. Each worker has {resident} of {blocks} blocks, "
        f"{way.held_bytes / GIB:.2f} GiB in all; {way.fetched_bytes / GIB:.2f} GiB "
        f"come from {source} in every evaluation"
    )
    if not way.seconds:
        return f"{text}. How fast is known once workers run."
    hidden = f"{way.exposed:.2f} s of them waiting for weights" if way.exposed else "all of it hidden behind computing"
    prompts = 1 if way.rows else -(-work.prompts // degrees.cfg_degree)
    what = "one prompt" if prompts == 1 else f"{prompts} prompts at once"
    return f"{text}: {way.seconds:.2f} s for {what}, {hidden}."


def _traffic(work: Work, degrees: Parallelism) -> str:
    passed = _passed(work, degrees)
    if degrees.context_parallel_size == 1:
        return passed or "none inside the model."
    layer = bytes_per_layer(work, degrees)
    return (
        f"each worker sends {layer / 2**20:.2f} MiB in each of {work.figures.layers} layers, "
        f"{layer * work.figures.layers / 2**20:.1f} MiB an evaluation. {passed}"
    ).strip()


def _passed(work: Work, degrees: Parallelism) -> str:
    """From stage to stage of a pipeline."""
    if degrees.pipeline_degree == 1:
        return ""
    each = passed_bytes(work) / degrees.context_parallel_size / 2**20
    return f"A stage passes {each:.2f} MiB on in each evaluation, and the last one gives a latent to all in each step."


def _launch(subject: Subject, division: Division, way: Prospect | None) -> str:
    """Where GPUs could be led by the host."""
    choice, work = division.degrees.cuda_graphs, subject.work
    if not division.placement.devices[0].startswith(CUDA.kind):
        return ""
    if division.degrees.pipeline_degree > 1:
        return "kernel by kernel: stages of a pipeline wait for each other in the middle of an evaluation."
    if choice == "off" or not work.recorded or (way is not None and way.fetched_bytes):
        return "kernel by kernel, in every evaluation."
    where = "" if choice == "on" else " where the CPU would launch it slower than the GPU computes"
    held = activation_bytes(work, division.degrees) / GIB
    faster = "compiled and recorded is the fastest way" if subject.compiled else "with compile on it is the fastest way"
    return f"an evaluation is recorded as a CUDA graph{where}, which keeps about {held:.2f} GiB more; {faster}."


def _speed(work: Work, degrees: Parallelism, link: Link | None) -> str:
    if link is None or not link.bytes_per_second:
        return ""
    several = evaluation_seconds(work, degrees, link)
    alone = evaluation_seconds(work, Parallelism(), link)
    return (
        f"one evaluation of one prompt is estimated {alone / several:.2f} times as fast as on one worker, "
        f"{_at_once(degrees)}at the measured "
        f"{link.bytes_per_second / 1e9:.1f} GB/s and {link.flops_per_second / 1e12:.1f} TFLOP/s."
    )


def _at_once(degrees: Parallelism) -> str:
    lanes = degrees.cfg_degree * degrees.data_degree
    return f"and {lanes} run side by side, " if lanes > 1 else ""


def _warnings(
    subject: Subject, degrees: Parallelism, placement: Placement, guided: bool, free: int | None, way: Prospect | None
) -> list[str]:
    work, warnings = subject.work, []
    if free is not None and _needed(work, degrees, way) > free:
        warnings.append("Too little memory: set weights to auto, take more workers, or make a smaller picture.")
    if way is not None and way.rows and guided:
        warnings.append("There is no room for several prompts at once: they are evaluated one after the other.")
    if work.figures.heads % degrees.ulysses_degree:
        warnings.append(
            f"{work.figures.heads} heads over ulysses_degree {degrees.ulysses_degree} is uneven: some workers wait for "
            "others. It is exact all the same; a divisor of the heads is faster."
        )
    if share_cores(placement):
        workers = len(placement.devices)
        warnings.append(f"{workers} workers share the {os.cpu_count()} CPU cores here: exact, but hardly faster.")
    if placement.shared and placement.devices[0] != "cpu":
        warnings.append("A GPU is named twice: exact, but slower than naming it once.")
    if placement.devices == ("cuda:0",) and (why := why_one_gpu(1)):
        warnings.append(f"{why}.")
    if untried := _untried(placement):
        warnings.append(f"{untried} have not been tried on hardware yet, only one H100 has: see docs/devices.md.")
    warnings += _of_prompts(subject, degrees, way) if guided else []
    return [*warnings, *_of_stages(work, degrees), *_of_rows(subject, degrees)]


def _of_stages(work: Work, degrees: Parallelism) -> list[str]:
    if degrees.pipeline_degree <= in_flight(work, degrees):
        return []
    return [
        f"Stages stand still {1 - filled(work, degrees):.0%} of the time: a pipeline is for weights that fit nowhere "
        "else and for slow links. Where cards are linked well, Ulysses and ring are faster."
    ]


def _untried(placement: Placement) -> str:
    """What of this placement nobody has run; "" for nothing."""
    if placement.devices[0] == "cpu":
        return ""
    if placement.nnodes > 1:
        return "Several machines with GPUs"
    kind = placement.devices[0].partition(":")[0]
    if kind != "cuda":
        return f"Devices of the kind {kind}"
    return "Several GPUs at once" if len(set(placement.devices)) > 1 else ""


def _of_prompts(subject: Subject, degrees: Parallelism, way: Prospect | None) -> list[str]:
    if _sharded(way) and degrees.cfg_degree > 1:
        return ["Each half of the workers has its own copy of the weights: cfg_degree 1 would need less."]
    even = degrees.cfg_degree == 1 and degrees.context_parallel_size % 2 == 0
    in_parts = way is not None and way.storage.mode != "replicate"
    if even and not in_parts and not subject.together:
        return ["With cfg above 1, cfg_degree 2 would exchange less: leave the degrees at 0, or set it."]
    return []


def _of_rows(subject: Subject, degrees: Parallelism) -> list[str]:
    work, data = subject.work, degrees.data_degree
    if subject.together and data > 1:
        return [
            f"Something on MODEL sees all images and prompts at once, so data_degree {data} gains nothing: each group "
            "of workers does all of the work."
        ]
    if data <= work.rows:
        return []
    if not work.figures.divisible:
        return [f"{work.figures.name} can share out prompts and images only: some workers have nothing to do."]
    return [
        f"data_degree {data} with {work.rows} in the batch leaves workers idle: set data_degree to {work.rows} and "
        "give the rest to the ring or Ulysses degree."
    ]
