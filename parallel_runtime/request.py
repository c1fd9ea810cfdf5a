"""The values of a CP Parallel Config node, and what the texts of `devices` and `shares` say. Each of its widgets is one
field of ParallelRequest or of EngineOptions."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from .accelerators import CUDA, KERNELS
from .errors import Refused, quoted, say, say_if

RotateMethod = Literal["alltoall", "allgather", "tokens", "auto"]
AttentionBackend = str  # one of BACKENDS
DtypeChoice = Literal["auto", "bfloat16", "float16", "float32"]
AfterSampling = Literal["keep", "offload", "unload"]
WeightsChoice = Literal["auto", "replicate", "shard", "offload"]
CompileChoice = Literal["off", "on"]
GraphsChoice = Literal["auto", "on", "off"]
CommDtype = Literal["same", "float8_e4m3fn"]
MAX_DEGREE = 64
BACKENDS = ("auto", "native", *KERNELS)
MAX_DEVICES = 64
MAX_DIGITS = 4  # of a GPU's number
MAX_SHARE_DIGITS = 9
MAX_CPU_WORKERS = max(8, os.cpu_count() or 1)
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Widget:
    """One input of the node. Saved workflows list values in the order of `place`: a new widget gets the number after
    the highest of both classes. Of `limits` the `min` and `max` are checked; `step` and `round` are for the page."""

    name: str
    field: str  # of ParallelRequest, or of EngineOptions
    of_engine: bool
    kind: type
    options: tuple[str, ...]  # empty where any value of its kind is allowed
    default: Any
    place: int
    tooltip: str
    limits: dict[str, float]
    required: bool
    advanced: bool


def widget(
    place: int, default: Value, tooltip: str, *, limits: dict[str, float] | None = None, name: str = "",
    options: tuple[str, ...] = (), required: bool = False, advanced: bool = True,
) -> Value:  # fmt: skip
    """Returns a dataclass field that a widget sets. Its type is that of `default`, so a number with a point is 0.0.
    `limits` have both `min` and `max`, `name` is the widget's name if it differs from the field's, and `options` are
    its allowed values where the field's type is no Literal of them."""
    described = {"place": place, "tooltip": tooltip, "limits": limits or {}, "required": required, "advanced": advanced}
    made: Value = field(default=default, metadata={"widget": described, "name": name, "options": options})
    return made


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of the engine, besides degrees and devices. Workers get them unchanged, in a Parallelism. A new option is
    a field here and the code in engine/ or worker/ that reads `parallelism.options`. A network is split anew when it
    changes, unless `Parallelism.without_run_options` (specs.py) leaves it out. Its words are a line in
    web/docs/CPParallelConfig.md and docs/parallel-config.md and seven tooltips in nodeDefs.json; one that makes the
    result differ is also in `approximate` and in APPROXIMATE of web/presets.js. tests/test_request.py wants another
    value of it (CHANGED), and tests.browser.templates writes the workflows anew."""

    # fmt: off
    rotate_method: RotateMethod = widget(
        3, "alltoall",
        "How a ring moves keys and values: alltoall passes blocks on while computing, allgather collects all others "
        "at once (more memory). auto = allgather if there is memory and the link is fast, else alltoall.",
        options=("alltoall", "allgather", "auto"),  # tokens: auto's choice, for networks that are split by rows
    )
    convert_to_fp32: bool = widget(4, True, "Merge the ring's partial results in float32.")
    attention_backend: AttentionBackend = widget(
        5, "auto",
        "The attention kernel of each worker, by diffusers' name. auto = the one that ComfyUI's flags, a node or the "
        "file ask for; else ComfyUI's own, or PyTorch's where that is faster or a ring needs it.",
        options=BACKENDS,
    )
    step_cache: float = widget(
        10, 0.0,
        "If the first block of the model changes by less than this share from one evaluation to the next, the other "
        "blocks are skipped. Faster, not exact; 0.05 to 0.1 is common. 0 = off. Refused if no plan splits the "
        "network, or if the loop stays in ComfyUI.",
        limits={"min": 0.0, "max": 1.0, "step": 0.01, "round": 0.001},
    )
    cuda_graphs: GraphsChoice = widget(
        16, "auto",
        "Record an evaluation of the model once as a CUDA graph, and replay it: one launch per evaluation, the same "
        "bits. auto: if Python cannot keep the GPU busy. on: always. Recorded sizes take GPU memory, four at most, "
        "until the model is unloaded.",
    )
    token_patches: int = widget(
        19, 1,
        "Parts of one evaluation that follow each other through the stages of a pipeline (PipeFusion), with keys and "
        "values that are one step old. Faster, approximate: not the picture of one GPU. 8 steps or more; not every "
        "network. 1 = exact.",
        limits={"min": 1, "max": MAX_DEGREE}, name="patches",
    )
    warmup_steps: int = widget(
        20, 1,
        "With patches above 1: this many first steps are exact. More are nearer to one GPU's picture, and slower; 2 to "
        "4 are advised below 20 steps.",
        limits={"min": 1, "max": 1000},
    )
    comm_dtype: CommDtype = widget(
        21, "same",
        "What queries, keys and values travel in between GPUs. float8_e4m3fn: half of the bytes, for slow links. "
        "Faster there, approximate: not the picture of one GPU. same: as they are computed, exact.",
    )
    # fmt: on

    @property
    def sends_float8(self) -> bool:
        return self.comm_dtype == "float8_e4m3fn"

    @property
    def approximate(self) -> bool:
        """Is the result another picture than that of one GPU?"""
        return self.step_cache > 0 or self.token_patches > 1 or self.sends_float8


@dataclass(frozen=True, kw_only=True)
class ParallelRequest:
    """The values of a CP Parallel Config. 0 and "auto" are resolved when the model is known. `devices` is a list such
    as "0,1", "cuda:0,cuda:1" or "cpu,cpu", and empty for all. Each of `nnodes` machines gives as many devices; the
    others connect to the first at `rdzv_endpoint`, "address:port". `shares` is "auto", "equal", or one number a
    worker. Workers get none of these fields but `options`.

    Planning reads `inputs.request`: request_checks.py refuses, candidates.py leaves plans out, resolve.py chooses. The
    words of a new field are where EngineOptions says; presets reset those of OWN in web/presets.js."""

    # fmt: off
    options: EngineOptions = field(default_factory=EngineOptions)
    ring_degree: int = widget(
        1, 0,
        "Split the picture over this many GPUs in a ring. Any number works. 0 = auto.",
        limits={"min": 0, "max": MAX_DEGREE}, required=True, advanced=False,
    )
    ulysses_degree: int = widget(
        2, 0,
        "Split the picture over this many GPUs by attention heads; at most one GPU per head. Best with NVLink. "
        "0 = auto. Workers in all: the product of the degrees.",
        limits={"min": 0, "max": MAX_DEGREE}, required=True, advanced=False,
    )
    dtype: DtypeChoice = widget(
        6, "auto", "The precision that the workers compute in. auto = what ComfyUI would use for this model."
    )
    devices: str = widget(
        7, "",
        "GPUs to use, such as 0,1. Empty = all. cpu,cpu starts two workers on the CPU, 0,0 two that share GPU 0.",
        advanced=False,
    )
    cfg_degree: int = widget(
        8, 0,
        "2: positive and negative prompt run side by side on two halves of the workers; at cfg 1 both halves work on "
        "the one prompt. 0 = auto.",
        limits={"min": 0, "max": 2},
    )
    data_degree: int = widget(
        9, 0,
        "Groups of workers that share the images of a batch, each with whole images. 1 = none, 0 = auto: if that is "
        "faster.",
        limits={"min": 0, "max": MAX_DEGREE},
    )
    after_sampling: AfterSampling = widget(
        11, "keep",
        "What the workers do with the model after a run: keep it, offload it to main memory, or unload it.",
    )
    nnodes: int = widget(
        12, 1,
        "Machines, this one included. Each gives as many devices as this one; the others run the join command and "
        "share a token with this one: see docs/several-machines.md.",
        limits={"min": 1, "max": MAX_DEGREE},
    )
    rdzv_endpoint: str = widget(
        13, "",
        "With several machines: the address of this one and a free port, such as 10.0.0.1:29500. The others "
        "connect to it.",
    )
    weights: WeightsChoice = widget(
        14, "auto",
        "Where the model's weights are. replicate: whole on every GPU. shard: each GPU keeps a part, and a block is "
        "gathered just before it runs. offload: once in main memory, and a block is copied to the GPU just before it "
        "runs. Both take as little GPU memory as they can. auto: replicate if it fits, else the faster of the two, "
        "with as many blocks on the GPU as fit.",
    )
    compile: CompileChoice = widget(
        15, "off",
        "on: torch.compile for each block of the model in the workers. The first step takes minutes; a new size may "
        "compile again. Torch Compile Model on the MODEL does the same.",
    )
    shares: str = widget(
        17, "auto",
        "How much of the work each GPU gets. 3,2 = the first GPU gets 60 % of the work; one number per GPU, in the "
        "order of devices. equal: all get the same. auto: by what the workers measure.",
    )
    pipeline_degree: int = widget(
        18, 1,
        "Stages of a pipeline: each has its own part of the model's blocks, and passes the tokens on. For models that "
        "do not fit, and for slow links; exact. Prompts and images follow each other through the stages. 1 = none, "
        "0 = if nothing else fits.",
        limits={"min": 0, "max": MAX_DEGREE},
    )
    # fmt: on

    @classmethod
    def of(cls, values: object) -> ParallelRequest:
        """Returns the request of these values by widget name; other names are ignored. Raises Refused for a value that
        is not of its widget's kind, options or limits; whether the request can run, planning/request_checks.py says."""
        if not isinstance(values, Mapping):
            raise Refused("config.object")
        request, options = dict[str, Any](), dict[str, Any]()
        for widget in widgets():
            if widget.name in values:
                (options if widget.of_engine else request)[widget.field] = _checked(widget, values[widget.name])
        return cls(options=EngineOptions(**options), **request)

    @property
    def values(self) -> dict[str, Any]:
        """The value of each widget, by its name."""
        return {widget.name: getattr(self.options if widget.of_engine else self, widget.field) for widget in widgets()}

    def with_values(self, changed: Mapping[str, Any]) -> ParallelRequest:
        """Returns the request with these widgets changed. Raises Refused as `of` does."""
        return ParallelRequest.of({**self.values, **changed})

    @property
    def with_default_degrees(self) -> ParallelRequest:
        """The request with all that divides the work at its default: degrees, shares and token patches."""
        dividing = [each for each in widgets() if each.name.endswith("_degree") or each.name in ("shares", "patches")]
        return self.with_values({each.name: each.default for each in dividing})

    def degrees_without_model(self, workers: int) -> dict[str, int]:
        """Returns each degree of a run on `workers` by its widget's name; 0 where only the model decides it."""
        degrees = {name: value for name, value in self.values.items() if name.endswith("_degree")}
        left = workers // math.prod(degree for degree in degrees.values() if degree)
        automatic = [name for name, degree in degrees.items() if not degree]
        if left == 1 or len(automatic) == 1:
            degrees |= dict.fromkeys(automatic, left)
        return degrees

    @property
    def by_heads(self) -> bool:
        """Does the number of workers depend on the model's heads?"""
        return bool(self.ring_degree and not self.ulysses_degree)


@cache
def widgets() -> tuple[Widget, ...]:
    """The node's widgets in their order."""
    made = [
        Widget(
            name=entry.metadata["name"] or entry.name,
            field=entry.name,
            of_engine=owner is EngineOptions,
            kind=type(entry.default),
            options=entry.metadata["options"] or get_args(get_type_hints(owner)[entry.name]),
            default=entry.default,
            **entry.metadata["widget"],
        )
        for owner in (ParallelRequest, EngineOptions)
        for entry in fields(owner)
        if entry.metadata
    ]
    return tuple(sorted(made, key=lambda widget: widget.place))


def _checked(widget: Widget, value: Any) -> Any:
    """Returns the value that the widget takes from `value`. Raises Refused."""
    types = (float, int) if widget.kind is float else (widget.kind,)
    if value == "auto" and widget.default == "":  # refusals call it auto where all devices are used
        return ""
    fix = {widget.name: widget.default}
    if type(value) not in types or value != value or value not in (widget.options or (value,)):
        values: dict[str, Any] = {"name": widget.name, "value": quoted(value)}
        if widget.options:
            raise Refused("widget.options", widget.name, fix, **values, options=list(widget.options))
        kind = say(f"kind.{widget.kind.__name__}")
        raise Refused("widget.kind", widget.name, fix, **values, kind=kind, default=quoted(widget.default))
    if widget.limits and not widget.limits["min"] <= value <= widget.limits["max"]:
        least, most = widget.limits["min"], widget.limits["max"]
        fix = {widget.name: min(max(value, least), most)}
        raise Refused("widget.range", widget.name, fix, name=widget.name, value=quoted(value), least=least, most=most)
    return value


def parse_devices(text: str, gpus: int, kind: str = CUDA.kind) -> tuple[str, ...]:
    """Returns the devices that `text` lists, every GPU where it is empty, and () for "the CPU, as often as needed"."""
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    if not names:
        return tuple(f"{kind}:{index}" for index in range(gpus))
    if len(names) > MAX_DEVICES:
        raise Refused("devices.many", "devices", {"devices": ""}, count=len(names), most=MAX_DEVICES)
    # CPU workers to use where there is no GPU.
    trial = "" if gpus else ",".join(["cpu"] * min(max(2, len(names)), MAX_CPU_WORKERS))
    fix, devices = {"devices": trial}, list[str]()
    for name in names:
        index = name.removeprefix(f"{kind}:")
        if name == "cpu":
            devices.append(name)
            continue
        if not index.isdecimal() or len(index) > MAX_DIGITS:
            out = say("devices.trial", trial=trial) if trial else say("devices.empty")
            raise Refused("devices.unknown", "devices", fix, device=quoted(name), kind=kind, out=out)
        if not gpus:
            raise Refused("devices.missing.all", "devices", fix, index=index, kind=kind.upper(), trial=trial)
        if int(index) >= gpus:
            reason = say("devices.missing", index=index, last=gpus - 1)
            if why := why_one_gpu(gpus):
                reason = say("reason.why", reason=reason, why=why)
            raise Refused(reason.key, "devices", fix, **reason.values)
        devices.append(f"{kind}:{int(index)}")
    if "cpu" in devices and len({device == "cpu" for device in devices}) > 1:
        known = ",".join(device for device in devices if device != "cpu")
        raise Refused("devices.mixed", "devices", {"devices": known}, devices=quoted(text), known=known)
    return tuple(devices)


def why_one_gpu(gpus: int) -> str:
    """Returns why there is only one GPU, where the environment may hide others; "" where it does not."""
    chosen = any(argument.startswith("--cuda-device") for argument in sys.argv)
    return say_if(gpus == 1 and not chosen and os.environ.get("CUDA_VISIBLE_DEVICES") == "0", "gpus.hidden")


def requested_shares(shares: str, workers: int, devices: int = 0, nnodes: int = 1) -> tuple[int, ...]:
    """Returns the share of each of this many workers, in rank order; () where `shares` leaves them to auto. Numbers may
    be one for each of a config's `devices` on each machine, of which workers have the first. Raises Refused."""
    if are_automatic(shares):
        return ()
    if shares.strip() == "equal":
        return (1,) * workers
    numbers, every, local = _numbers(shares), devices * nnodes, workers // nnodes
    if not numbers:
        raise Refused("shares.text", "shares", {"shares": "auto"}, shares=quoted(shares))
    if len(numbers) == workers:
        return numbers
    if len(numbers) != every or local > devices:
        text = quoted(shares.strip())
        raise Refused("shares.count", "shares", {"shares": "auto"}, shares=text, count=len(numbers), workers=workers)
    return tuple(number for machine in range(nnodes) for number in numbers[machine * devices :][:local])


def are_automatic(shares: str) -> bool:
    """Are these shares left to auto?"""
    return shares.strip() in ("", "auto")


def are_uneven(shares: str) -> bool:
    """Are these shares numbers that are not all equal?"""
    return len(set(_numbers(shares))) > 1


def _numbers(shares: str) -> tuple[int, ...]:
    """Returns the comma-separated whole numbers; () for other text."""
    words = [word.strip() for word in shares.split(",")]
    known = all(word.isascii() and word.isdecimal() and len(word) <= MAX_SHARE_DIGITS for word in words)
    return tuple(map(int, words)) if known else ()
