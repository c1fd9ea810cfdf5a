"""What the user asked for. Nodes build these, the wire ships them, workers obey them; nobody mutates them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, get_args, get_type_hints

from .errors import Refused

RotateMethod = Literal["alltoall", "allgather", "auto"]
AttentionBackend = Literal["auto", "native", "_native_flash", "_native_cudnn", "flash", "_flash_3", "sage"]
DtypeChoice = Literal["auto", "bfloat16", "float16", "float32"]
AfterSampling = Literal["keep", "offload", "unload"]
WeightsMode = Literal["replicate", "shard", "offload"]
WeightsChoice = Literal["auto", "replicate", "shard", "offload"]
CompileChoice = Literal["off", "on"]
GraphsChoice = Literal["auto", "on", "off"]
VAEMethod = Literal["decode", "encode"]
DEGREES = ("ring_degree", "ulysses_degree", "cfg_degree", "data_degree", "pipeline_degree")
DEMO = "demo"  # the loader of the demo model


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How one sampling job is divided over the ranks of a group.

    The world is pipeline_degree x data_degree x cfg_degree x ring_degree x ulysses_degree; the ranks of one Ulysses
    group are neighbours, and stages of a pipeline are furthest apart: between machines first. Data groups share the
    rows of a batch, cfg groups the branches of guidance, stages the blocks of the network: each has so many of them in
    turn as `stages` says, () for about as many as the others. Of each evaluation `patches` follow one another through
    them: 1 is exact.
    `rotate_method` is diffusers' word for how a ring moves keys and values: `alltoall` rotates the blocks point to
    point, `allgather` collects them all at once; the host decides what `auto` is (host/cost.py), and where nobody did
    it is `alltoall`. `cuda_graphs`: are evaluations of a network recorded and replayed; with "auto" those that the
    host launches slower than its device computes. Degrees are resolved numbers here. `shares` are of the ranks, in
    rank order: each gets work in proportion to its own; none: all get alike.
    """

    ring_degree: int = 1
    ulysses_degree: int = 1
    cfg_degree: int = 1
    data_degree: int = 1
    pipeline_degree: int = 1
    stages: tuple[int, ...] = ()
    patches: int = 1
    rotate_method: RotateMethod = "alltoall"
    convert_to_fp32: bool = True
    attention_backend: AttentionBackend = "auto"
    cuda_graphs: GraphsChoice = "auto"
    shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, degree in self.by_name.items():
            if degree < 1:
                raise ValueError(f"{name} starts at 1, got {degree}")
        if self.cfg_degree > 2:
            raise ValueError(f"cfg_degree is 1 or 2 (positive and negative prompt), got {self.cfg_degree}")
        if self.pipeline_degree > 1 and self.ring_degree > 1:
            raise ValueError(f"a stage of a pipeline has no ring, got ring_degree {self.ring_degree}")
        if self.patches < 1 or (self.patches > 1 and self.pipeline_degree == 1):
            raise ValueError(f"patches go through the stages of a pipeline, got {self.patches} and no pipeline")
        if self.stages and (len(self.stages) != self.pipeline_degree or min(self.stages) < 1):
            raise ValueError(f"stages {self.stages} are not {self.pipeline_degree}")
        if self.shares:
            self._check_shares()

    def _check_shares(self) -> None:
        if len(self.shares) != self.world_size:
            raise Refused(
                f"shares are one a worker, {self.world_size} of them, got {len(self.shares)}: {_listed(self.shares)}"
            )
        if min(self.shares) < 0:
            raise Refused(f"shares start at 0, got {_listed(self.shares)}")
        if not all(map(sum, self.lanes)):
            raise Refused(
                f"shares {_listed(self.shares)} leave nobody to do the work of a lane: of each "
                f"{self.context_parallel_size} worker(s) that have a prompt or an image to themselves one needs a "
                "share above 0; write 1 there, or set cfg_degree and data_degree to 1"
            )

    @property
    def by_name(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in DEGREES}

    @property
    def context_parallel_size(self) -> int:
        """Ranks that share one sequence."""
        return self.ring_degree * self.ulysses_degree

    @property
    def cuts_tokens(self) -> bool:
        """Are there attentions of a part of the tokens?"""
        return self.context_parallel_size * self.patches > 1

    @property
    def lanes(self) -> list[tuple[int, ...]]:
        """The shares of the ranks of each sequence, in rank order; all alike where there are none."""
        shares, each = self.shares or (1,) * self.world_size, self.context_parallel_size
        return [shares[first : first + each] for first in range(0, len(shares), each)]

    @property
    def rows(self) -> tuple[int, ...]:
        """The shares of all ranks together that have the same rows of a batch."""
        each, sums = self.cfg_degree, [sum(lane) for lane in self.lanes]
        return tuple(sum(sums[first : first + each]) for first in range(0, self.data_degree * each, each))

    @property
    def dims(self) -> tuple[int, int, int, int, int]:
        """Sizes of the mesh's: pipeline, data, cfg, ring, ulysses."""
        return (self.pipeline_degree, *self.shape)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The same of one stage: data, cfg, ring, ulysses."""
        return (self.data_degree, self.cfg_degree, self.ring_degree, self.ulysses_degree)

    @property
    def world_size(self) -> int:
        return self.pipeline_degree * self.data_degree * self.cfg_degree * self.context_parallel_size


def _listed(shares: tuple[int, ...]) -> str:
    return ",".join(map(str, shares))


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Where the weights of a model are at rest.

    `replicate`: whole on every device. `shard`: of a block each rank that shares a sequence keeps a part, and all
    gather it just before it runs. `offload`: in main memory, once a machine, copied to the device just before it runs.
    `resident` of the blocks are whole on every device all the same; where ranks have unlike numbers of them `residents`
    are those of each, in rank order, and `resident` is the least. `parts` are the ranks' of a shard: of a block each
    keeps in proportion to its own; none: all alike.
    """

    mode: WeightsMode = "replicate"
    resident: int = 0
    residents: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.residents and (self.mode != "offload" or min(self.residents) != self.resident):
            raise ValueError(f"residents {self.residents} of {self.mode} are not {self.resident} at least")
        if self.parts and (self.mode != "shard" or min(self.parts) < 1):
            raise ValueError(f"parts {self.parts} of {self.mode}: a shard's start at 1")

    def resident_on(self, rank: int) -> int:
        return self.residents[rank] if self.residents else self.resident


@dataclass(frozen=True, kw_only=True)
class ParallelRequest:
    """What a CP Parallel Config node says. 0 and "auto" are decided when the model is known; `devices` is a list such
    as "0,1", "cuda:0,cuda:1" or "cpu,cpu", and empty for all. `step_cache` is a threshold, 0 for no cache. Of `nnodes`
    machines each gives as many devices as this one, which the others reach at `rdzv_endpoint`, "address:port".
    `compile` is torch.compile as it comes; a MODEL may say more of it (ModelSpec). `cuda_graphs`: see Parallelism.
    `shares` are "auto", "equal", or a number for each worker, such as "3,2". Of `patches` all are there in the first
    `warmup_steps`: these are exact."""

    ring_degree: int = 0
    ulysses_degree: int = 0
    rotate_method: RotateMethod = "alltoall"
    convert_to_fp32: bool = True
    attention_backend: AttentionBackend = "auto"
    dtype: DtypeChoice = "auto"
    devices: str = ""
    cfg_degree: int = 0
    data_degree: int = 1
    step_cache: float = 0.0
    after_sampling: AfterSampling = "keep"
    nnodes: int = 1
    rdzv_endpoint: str = ""
    weights: WeightsChoice = "auto"
    compile: CompileChoice = "off"
    cuda_graphs: GraphsChoice = "auto"
    shares: str = "auto"
    pipeline_degree: int = 1
    patches: int = 1
    warmup_steps: int = 1

    @classmethod
    def of(cls, values: object) -> ParallelRequest:
        """What widgets of these values, by name, say; others are passed over. Raises Refused for what a widget cannot
        hold; whether it can work is decided where the devices are known."""
        if not isinstance(values, Mapping):
            raise Refused("expected an object of widget values")
        return cls(**{name: _held(name, kind, values[name]) for name, kind in widgets().items() if name in values})

    @property
    def by_heads(self) -> bool:
        """Does the number of workers depend on the model's heads?"""
        return bool(self.ring_degree and not self.ulysses_degree)

    def with_degrees(self, **degrees: int) -> Parallelism:
        """What is asked for beside them stays as it is."""
        return Parallelism(
            **degrees,
            stages=(),
            shares=(),
            rotate_method=self.rotate_method,
            convert_to_fp32=self.convert_to_fp32,
            attention_backend=self.attention_backend,
            cuda_graphs=self.cuda_graphs,
            patches=self.patches,
        )


@cache
def widgets() -> dict[str, Any]:
    """What each of a ParallelRequest's values is, by name."""
    return get_type_hints(ParallelRequest)


IN_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _held(name: str, kind: Any, value: Any) -> Any:
    options = get_args(kind)
    kind = str if options else kind
    types = (float, int) if kind is float else (kind,)
    if value == "auto" and getattr(ParallelRequest, name) == "":  # what is empty is auto's, and refusals call it so
        return ""
    if type(value) not in types or value != value or value not in (options or (value,)):
        raise Refused(f"{name} is {value!r}, and not {'one of ' * bool(options)}{', '.join(options) or IN_WORDS[kind]}")
    return value


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """How torch.compile is to treat the blocks of a network, in its own words; `options` are its backend's, as JSON."""

    backend: str = "inductor"
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    options: str = "{}"

    @property
    def records(self) -> bool:
        """Does the compiler make CUDA graphs of its own?"""
        by_mode = self.mode is not None and "no-cudagraphs" not in self.mode and self.mode != "default"
        return by_mode or bool(json.loads(self.options).get("triton.cudagraphs"))


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file that a model is read from: `size` (bytes) and `mtime_ns` pin it as it was when it was described."""

    path: str
    size: int
    mtime_ns: int


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model by description: what a worker calls to load it, when the first job needs it.

    `loader` is `module:function` of ComfyUI, or a name that the worker knows; `arguments` are its positional arguments
    as canonical JSON (nodes/origin.py), `index` says which of several results it is. `weight_dtype` is what ComfyUI
    holds unquantised weights in, `compute_dtype` what it computes in, "" for its own choice. `patches` identifies the
    stack of weight patches (LoRA and the like) on it, "" for none; the patches come with the job. `compilation` is None
    for a network that runs as it is.
    A VAE is one of the classes `kind` (autoencoders.py), whose weights and structure `witness` tells from all others.
    Without a `loader` its weights come with the job, and `arguments` are its file's metadata.
    """

    loader: str
    arguments: str = "[]"
    index: int | None = None
    files: tuple[SourceFile, ...] = ()
    weight_dtype: str = "float32"
    compute_dtype: str = ""
    patches: str = ""
    compilation: Compilation | None = None
    kind: str = ""
    witness: str = ""

    @property
    def title(self) -> str:
        """The file's name, for people; the loader's where there is none; a VAE's class."""
        if self.kind:
            return self.kind.partition("(")[0].rpartition(".")[2]
        return os.path.basename(self.files[0].path) if self.files else self.loader

    @property
    def unpatched(self) -> ModelSpec:
        """What is loaded: the same for every stack of patches, whatever it is computed in, and compiled or not."""
        return replace(self, patches="", compute_dtype="", compilation=None)


@dataclass(frozen=True, kw_only=True)
class ComfySetup:
    """The host's ComfyUI: its checkout, the command-line flags it runs with, the folder that these speak of, and its
    version, "" where any will do."""

    root: str
    flags: tuple[str, ...] = ()
    folder: str = "/"
    version: str = ""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the ranks of a group live: one torch device a rank, in rank order. A device may be named twice.

    With `nnodes` machines `devices` are this machine's, whose ranks come first, and every other gives as many. They
    find this one at `rdzv_endpoint`.
    """

    devices: tuple[str, ...]
    nnodes: int = 1
    rdzv_endpoint: str = ""

    @property
    def world_size(self) -> int:
        return len(self.devices) * self.nnodes

    @property
    def each(self) -> tuple[str, ...]:
        """Each rank's device; those of other machines by their numbers too."""
        machines = ["", *(f" of machine {number}" for number in range(2, self.nnodes + 1))]
        return tuple(f"{device}{machine}" for machine in machines for device in self.devices)

    @property
    def shared(self) -> bool:
        return len(set(self.devices)) < len(self.devices)


@dataclass(frozen=True, kw_only=True)
class Division:
    """How a run is divided, and among whom: one rank of `placement` for each share of `degrees`. Its weights are in
    `storage`, and `rows` of a batch are evaluated at once, 0: all, those of several prompts too."""

    degrees: Parallelism
    placement: Placement
    storage: Storage = Storage()
    rows: int = 0

    def __post_init__(self) -> None:
        if self.degrees.world_size != self.placement.world_size:
            raise ValueError(
                f"degrees {self.degrees.shape} make {self.degrees.world_size} shares, and there are "
                f"{self.placement.world_size} workers"
            )
