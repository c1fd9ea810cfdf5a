"""Every message there is, and what a rank reports beside its results: memory, the models that it has, the time of
a step. Messages travel as JSON: readable in a log, and free of class identity.

host -> each rank       Welcome  Measure  MapOutput (with memory)  Run (with a bundle)  Cancel
rank -> host            Ready  Connected  Joined  Heartbeat  Step (with a bundle)  Done (rank 0: with a bundle)  Failed
machine -> host         Machine  Ended
torchrun -> who has started it  Ended
host -> machine         Invitation  Denied"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
import types
import typing
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal

from .. import jobs, request, specs
from ..errors import Cause, OutOfMemory, ParallelError, ProtocolError, Refused, Sentence, from_json, say, to_json
from ..request import AfterSampling
from ..specs import ComfySetup, ModelSpec, Parallelism, WeightPlacement

Busy = Literal["", "compiling", "recording"]  # with what makes later evaluations faster


@dataclass(frozen=True)
class ModelMemory:
    """The bytes that a rank has of one model: weights on its device, weights elsewhere that it fetches when needed, and
    recorded forwards on the device, which can be dropped at any time. `model` is its title for users; `fingerprint`
    identifies its spec."""

    model: str
    resident: int
    fetched: int = 0
    fingerprint: str = ""
    recorded: int = 0

    @property
    def device_bytes(self) -> int:
        return self.resident + self.recorded


@dataclass(frozen=True)
class Graphs:
    """Forwards that a rank has recorded: how many kinds of calls, how often they were replayed in all, the bytes of
    its device that they hold; and why others are `eager`, in a few words each."""

    keys: int = 0
    replays: int = 0
    bytes: int = 0
    eager: tuple[str, ...] = ()


# Of Readings, by web/rank.js, and for scripts (docs/scripts.md, "ranks"): of workers' GPUs. Those without a worker are
# described by gpu_list in nodes/routes.py, and gpuParts in web/rank.js shows them.
SHOWN = ("used_bytes", "total_bytes", "step_seconds", "waited_seconds")


@dataclass(frozen=True)
class Readings:
    """The measurements of one rank, all of the same moment. `used_bytes` of its device are taken by any process; on the
    CPU by this one. `free_bytes` are free for any process, `allocator_free_bytes` reserved by this rank's allocator and
    unused; `host_free_bytes` of main memory are free. Seconds are those of the last step, 0 before the first. In
    `waited_seconds` of them it waited for other ranks' tensors; None if unknown, as where the device replays a
    recording. `computed_seconds` is the median of the run of what this rank computed in a step; None if unknown."""

    used_bytes: int
    total_bytes: int
    weights: tuple[ModelMemory, ...] = ()
    step_seconds: float = 0.0
    waited_seconds: float | None = None
    computed_seconds: float | None = None
    graphs: Graphs = Graphs()
    free_bytes: int = 0
    allocator_free_bytes: int = 0
    host_free_bytes: int = 0

    @property
    def rank_bytes(self) -> int:
        """Returns the device memory of this rank: its models, and what its allocator has free."""
        return self.allocator_free_bytes + sum(model.device_bytes for model in self.weights)

    def other_models_bytes(self, fingerprint: str) -> int:
        """Returns the device memory of this rank for models other than the one with this fingerprint."""
        return sum(model.device_bytes for model in self.weights if model.fingerprint != fingerprint)

    def resident_bytes(self, fingerprint: str) -> int:
        """Returns the bytes of this model's weights on the device."""
        return sum(model.resident for model in self.weights if model.fingerprint == fingerprint)

    def recorded_bytes(self, fingerprint: str) -> int:
        """Returns the device bytes of its recorded forwards: a run needs no others for its activations."""
        return sum(model.recorded for model in self.weights if model.fingerprint == fingerprint)


PACKET_BYTES = 128 << 10  # Linux gives a socket 208 KiB
TEXT_CHARACTERS, LIST_ITEMS = 1000, 64  # of a refusal's values
# What host and worker must agree on: the code of the messages themselves, as each of them has it loaded.
PROTOCOL = hashlib.sha256(
    b"".join(Path(module.__file__ or "").read_bytes() for module in (request, specs, jobs, sys.modules[__name__]))
).hexdigest()[:16]


@dataclass(frozen=True)
class Welcome:
    """Says that the host has accepted this rank. `store` is where the ranks meet, a file or host:port; ranks that share
    a device exchange tensors `through_main_memory`; `comfy` is None where there is no ComfyUI."""

    device: str
    store: str
    through_main_memory: bool
    comfy: ComfySetup | None


@dataclass(frozen=True)
class Measure:
    """Asks for the rank's readings. Before that it drops the conditions of `model`, if one is named, that a native
    sampler's run had, and does with its weights what `after` says; or, with `recordings`, it only discards the
    model's recorded forwards, and each of `ranks` gives back `nbytes` of its device that weights take. With `degrees`
    it makes their communicators instead, those of `sharded` weights too: their memory counts."""

    job: int
    model: ModelSpec | None = None
    after: AfterSampling = "unload"
    recordings: bool = False
    ranks: tuple[int, ...] = ()
    nbytes: int = 0
    degrees: Parallelism | None = None
    sharded: bool = False


@dataclass(frozen=True)
class Run:
    """Asks for one job, which is in the bundle, on the model that it names."""

    job: int
    model: ModelSpec
    parallelism: Parallelism
    weight_placement: WeightPlacement


@dataclass(frozen=True)
class Cancel:
    job: int


@dataclass(frozen=True)
class MapOutput:
    """Brings memory of ComfyUI's process, into which its machine's ranks write the next job's result."""


@dataclass(frozen=True)
class Ready:
    rank: int
    pid: int
    token: str
    protocol: str


@dataclass(frozen=True)
class Connected:
    """Says that this rank has exchanged tensors with all others, which arrived as they were sent."""


@dataclass(frozen=True)
class Joined:
    """Says that this rank is ready for jobs, with what it measured: FLOP/s of its device, bytes/s to the next rank (0:
    there is none), bytes/s from main memory to it while all ranks copy, and FLOP/s in attention."""

    flops_per_second: float
    bytes_per_second: float
    host_bytes_per_second: float = 0.0
    readings: Readings | None = None
    attention_flops_per_second: float = 0.0


@dataclass(frozen=True)
class Heartbeat:
    """Says that this rank is alive. `loaded` is None while sampling, else the share of the model that is loaded.
    `busy` says what delays the next message; `advanced`, whether the rank got on since the last one."""

    job: int
    loaded: float | None = None
    readings: Readings | None = None
    busy: Busy = ""
    advanced: bool = True


@dataclass(frozen=True)
class Step:
    """Reports a call of a sampler's callback: `step` counts from 0, as ComfyUI's does; the bundle holds x0 and x. A VAE
    has no bundle: `step` frames of `total` are done."""

    job: int
    step: int
    total: int


@dataclass(frozen=True)
class Refusal:
    """A Refused as it travels: plain JSON."""

    code: str
    widget: str | None
    fix: dict[str, Any]
    values: dict[str, Any]

    @classmethod
    def of(cls, refused: Refused) -> Refusal:
        """Cuts texts and lists so that the message fits into a packet, whatever the characters."""
        values = {name: _truncated(to_json(value)) for name, value in refused.values.items()}
        return cls(refused.code, refused.widget, refused.fix, values)

    def raised(self, machine: str = "") -> Refused:
        """Returns the Refused that was sent, with the address of another `machine` if it came from one."""
        values = {name: from_json(value) for name, value in self.values.items()}
        refused = Refused(self.code, self.widget, self.fix, **values)
        if not machine:
            return refused
        return Refused("on.machine", self.widget, self.fix, reason=refused.sentence, machine=machine)


@dataclass(frozen=True)
class Done:
    job: int
    refused: Refusal | None = None  # why it cannot be done; the rank is at rest
    load_seconds: float = 0.0
    seconds: float = 0.0
    readings: Readings | None = None


@dataclass(frozen=True)
class Failed:
    """Says that this rank has raised, and ends. `reason` is a sentence as it travels."""

    cause: Cause
    reason: dict[str, Any]
    traceback: str

    @classmethod
    def of(cls, rank: int, error: Exception) -> Failed:
        """Cuts texts so that the message fits into a packet, whatever the characters."""
        text = "".join(traceback.format_exception(error))[-8000:]
        if isinstance(error, ParallelError) and not isinstance(error, Refused):  # a sentence by itself
            kind: Any = "out_of_memory" if isinstance(error, OutOfMemory) else "raised"
            return cls(Cause(kind=kind, rank=rank), to_json(error.sentence), text)
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(last.filename)}:{last.lineno} {last.line}"[:500]
        reason = say("died.error", error=f"{type(error).__name__}: {error}"[:2000], where=where)
        return cls(Cause(kind="raised", rank=rank), to_json(reason), text)

    @property
    def sentence(self) -> Sentence:
        return from_json(self.reason)


@dataclass(frozen=True)
class Machine:
    """Offers another machine's devices. `devices` is what its user wrote, "" for like the host's; `comfyui` is its
    folder of ComfyUI, "" for the same path as the host's."""

    versions: tuple[str, ...]
    devices: str
    gpus: int
    comfyui: str


@dataclass(frozen=True)
class Invitation:
    """Asks a machine for `workers` ranks, as torchrun `index` of `nnodes`, which meet at port `store` with `token`."""

    index: int
    nnodes: int
    workers: int
    store: int
    token: str


@dataclass(frozen=True)
class Denied:
    """Says why a machine does not match the group."""

    reason: str


@dataclass(frozen=True)
class Ended:
    """Reports the end of a torchrun: `causes` are the failed workers in order of failure, `error` is torchrun's
    own, and `last_line` the output, on another machine, of the first worker to fail."""

    causes: tuple[Cause, ...] = ()
    error: str = ""
    last_line: str = ""


Message = (
    Welcome | Measure | MapOutput | Run | Cancel
    | Ready | Connected | Joined | Heartbeat | Step | Done | Failed
    | Machine | Invitation | Denied | Ended
)  # fmt: skip

_TYPES = {cls.__name__: cls for cls in typing.get_args(Message)}


def _truncated(value: Any) -> Any:
    match value:
        case str():
            return value[:TEXT_CHARACTERS]
        case list():
            return [_truncated(item) for item in value[:LIST_ITEMS]]
        case dict():
            return {name: _truncated(item) for name, item in value.items()}
    return value


def encode(message: Message) -> bytes:
    data = json.dumps({"type": type(message).__name__, **asdict(message)}).encode()
    assert len(data) <= PACKET_BYTES, f"{type(message).__name__} of {len(data)} bytes"
    return data


def decode(data: bytes) -> Any:
    """Returns the message in `data`. Raises ProtocolError for anything that is not exactly one of ours."""
    try:
        fields = json.loads(data)
        return _build(_TYPES[fields.pop("type")], fields)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"not a message: {error!r}") from error


def _build(hint: Any, value: Any) -> Any:
    """Makes of a JSON value what the type hint asks for: a dataclass, a tuple, one of a union, a plain value."""
    origin = typing.get_origin(hint)
    if isinstance(hint, type) and is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        return hint(**{name: _build(hints[name], item) for name, item in value.items()})
    if origin is tuple:
        return tuple(_build(typing.get_args(hint)[0], item) for item in value)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in typing.get_args(hint):
            return None
        return _build(next(arg for arg in typing.get_args(hint) if arg is not type(None)), value)
    if origin is dict and isinstance(value, dict):
        return value
    if origin is typing.Literal:
        if value not in typing.get_args(hint):
            raise ValueError(f"{value!r} is none of {typing.get_args(hint)}")
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise TypeError(f"{value!r} is no {hint}")
    return value
