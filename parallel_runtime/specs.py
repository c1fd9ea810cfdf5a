"""Frozen values of a request, built by nodes and sent to workers: parallelism, weights, model and devices."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .errors import Refused
from .request import EngineOptions

WeightsMode = Literal["replicate", "shard", "offload"]
VAEMethod = Literal["decode", "encode"]
EncoderMethod = Literal["encode_token_weights", "generate"]
DEGREES = ("ring_degree", "ulysses_degree", "cfg_degree", "data_degree", "pipeline_degree")
DEMO = "demo"  # the loader of the demo model


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How one sampling job is divided over the ranks of a group.

    The world size is pipeline_degree x data_degree x cfg_degree x ring_degree x ulysses_degree; the ranks of one
    Ulysses group are neighbours, and pipeline stages are furthest apart: between machines first. Data groups divide
    the rows of a batch, cfg groups the branches of guidance, stages the blocks of the network: `stages` are the number
    of blocks of each, () for about equal ones. Degrees are resolved numbers here; `options.rotate_method` "auto" is
    decided by the host (planning/seconds.py), and otherwise is "alltoall". `shares` are proportions of work in rank
    order; empty for equal ones.
    """

    ring_degree: int = 1
    ulysses_degree: int = 1
    cfg_degree: int = 1
    data_degree: int = 1
    pipeline_degree: int = 1
    stages: tuple[int, ...] = ()
    options: EngineOptions = field(default_factory=EngineOptions)
    shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, degree in self.by_name.items():
            if degree < 1:
                raise ValueError(f"{name} starts at 1, got {degree}")
        if self.cfg_degree > 2:
            raise ValueError(f"cfg_degree is 1 or 2 (positive and negative prompt), got {self.cfg_degree}")
        if self.pipeline_degree > 1 and self.ring_degree > 1:
            raise ValueError(f"a stage of a pipeline has no ring, got ring_degree {self.ring_degree}")
        patches = self.options.token_patches
        if patches < 1 or (patches > 1 and self.pipeline_degree == 1):
            raise ValueError(f"token patches go through the stages of a pipeline, got {patches} and no pipeline")
        if self.stages and (len(self.stages) != self.pipeline_degree or min(self.stages) < 1):
            raise ValueError(f"stages {self.stages} are not {self.pipeline_degree}")
        if self.shares:
            self._check_shares()

    def _check_shares(self) -> None:
        shares = ",".join(map(str, self.shares))
        if len(self.shares) != self.world_size:
            raise ValueError(f"shares are one per worker, {self.world_size} of them, got {len(self.shares)}: {shares}")
        if min(self.shares) < 0:
            raise ValueError(f"shares start at 0, got {shares}")
        if not all(map(sum, self.cp_group_shares)):
            raise Refused("shares.nobody", "shares", {"shares": "auto"}, shares=shares)

    @property
    def by_name(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in DEGREES}

    def with_options(self, **options: Any) -> Parallelism:
        """Returns a copy with these fields of EngineOptions changed."""
        return replace(self, options=replace(self.options, **options))

    @property
    def without_run_options(self) -> Parallelism:
        """The parallelism without the options that a run may change while the network stays split as it is."""
        return self.with_options(step_cache=0.0, warmup_steps=1)

    @property
    def context_parallel_size(self) -> int:
        """Ranks that share one sequence."""
        return self.ring_degree * self.ulysses_degree

    @property
    def splits_tokens(self) -> bool:
        """Does any attention see only a part of the tokens?"""
        return self.context_parallel_size * self.options.token_patches > 1

    @property
    def cp_group_shares(self) -> list[tuple[int, ...]]:
        """The shares of each cp group's ranks, in rank order; 1 each where there are none."""
        shares, each = self.shares or (1,) * self.world_size, self.context_parallel_size
        return [shares[first : first + each] for first in range(0, len(shares), each)]

    @property
    def data_group_shares(self) -> tuple[int, ...]:
        """The sum of the shares of each data group, whose ranks have the same rows of a batch."""
        each, sums = self.cfg_degree, [sum(group) for group in self.cp_group_shares]
        return tuple(sum(sums[first : first + each]) for first in range(0, self.data_degree * each, each))

    @property
    def work_fractions(self) -> list[float]:
        """Each worker's fraction of all the work."""
        # Of different prompts ranks have equal parts whatever their shares, of different images parts in proportion.
        groups, cfg = self.data_group_shares, self.cfg_degree
        return [
            share / sum(shares) / cfg * groups[number // cfg % len(groups)] / sum(groups)
            for number, shares in enumerate(self.cp_group_shares)
            for share in shares
        ]

    @property
    def shares_have_no_effect(self) -> bool:
        """Do shares differ only between the groups of cfg_degree, which have a prompt each whatever their shares?"""
        even = all(len(set(shares)) == 1 for shares in self.cp_group_shares)
        return len(set(self.shares)) > 1 and even and len(set(self.data_group_shares)) == 1

    def stage_of(self, rank: int) -> int:
        return rank * self.pipeline_degree // self.world_size

    def blocks_of(self, rank: int) -> tuple[int, int] | None:
        """The first and the last of the blocks that the rank has, counted from 1; None where it has all of them."""
        if not self.stages:
            return None
        before = sum(self.stages[: self.stage_of(rank)])
        return before + 1, before + self.stages[self.stage_of(rank)]

    @property
    def mesh_shape(self) -> tuple[int, int, int, int, int]:
        """Sizes of the mesh's dimensions: pipeline, data, cfg, ring, ulysses."""
        return (self.pipeline_degree, *self.stage_mesh_shape)

    @property
    def stage_mesh_shape(self) -> tuple[int, int, int, int]:
        """Sizes of one stage's mesh dimensions: data, cfg, ring, ulysses."""
        return (self.data_degree, self.cfg_degree, self.ring_degree, self.ulysses_degree)

    @property
    def world_size(self) -> int:
        return self.pipeline_degree * self.data_degree * self.cfg_degree * self.context_parallel_size


BLOCK_BUFFERS = 2  # of a device, into which blocks are fetched in turn


@dataclass(frozen=True, kw_only=True)
class WeightPlacement:
    """Where the weights of a model are kept between uses.

    `replicate`: in full on every device. `shard`: each rank of a cp group keeps a part of a block, which all gather
    just before it runs. `offload`: in main memory, once a machine; a block is copied to the device just before it runs.
    `resident_blocks` stay in full on every device in any mode; where ranks have different numbers of them,
    `resident_blocks_by_rank` has each and `resident_blocks` is the least. `shard_shares` are proportions of a block
    that the ranks keep; empty for equal ones.
    """

    mode: WeightsMode = "replicate"
    resident_blocks: int = 0
    resident_blocks_by_rank: tuple[int, ...] = ()
    shard_shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        blocks = self.resident_blocks_by_rank
        if blocks and (self.mode != "offload" or min(blocks) != self.resident_blocks):
            raise ValueError(f"resident blocks {blocks} of {self.mode} have another least than {self.resident_blocks}")
        if self.shard_shares and (self.mode != "shard" or min(self.shard_shares) < 1):
            raise ValueError(f"shard shares {self.shard_shares} of {self.mode}: those of shard start at 1")

    def resident_blocks_on(self, rank: int) -> int:
        return self.resident_blocks_by_rank[rank] if self.resident_blocks_by_rank else self.resident_blocks


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """The arguments of torch.compile for the blocks of a network; `options` are its backend's, as JSON."""

    backend: str = "inductor"
    mode: str | None = None
    fullgraph: bool = False
    dynamic: bool | None = None
    options: str = "{}"

    @property
    def makes_graphs(self) -> bool:
        """Does the compiler make CUDA graphs itself?"""
        by_mode = self.mode is not None and "no-cudagraphs" not in self.mode and self.mode != "default"
        return by_mode or bool(json.loads(self.options).get("triton.cudagraphs"))


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file that a model is read from: `size` (bytes) and `mtime_ns` are from when it was described."""

    path: str
    size: int
    mtime_ns: int


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model by description: what a worker calls to load it, when the first job needs it.

    `loader` is `module:function` of ComfyUI, or a name that the worker knows; `arguments` are its positional arguments
    as canonical JSON (nodes/describe/model_source.py), `index` selects one result. Or it is the class of a node,
    `arguments` are an object with the node's inputs and the folders of models, and the `weights_fingerprint` tells
    which of its results is the model. `weight_dtype` is ComfyUI's
    dtype of unquantised weights, `compute_dtype` that of computation, "" for its own choice. `force_cast` tells whether
    the MODEL has layers cast their weights at each use, `dynamic_vram` whether the host has ComfyUI's dynamic VRAM,
    which has so too, and does not round small layers to `weight_dtype`.
    `patches_fingerprint` identifies the stack of weight patches (LoRA and the like) on it by ComfyUI's `patches_uuid`,
    which is another one for each stack that a node makes; "" for none. The patches come with the job.
    `attributes` are plain values that nodes have given to attributes of the loaded model in place: a JSON object by
    their paths, "" for none. Workers set them for a run.
    `compilation` is None for a network that runs as it is.
    A VAE is one of the classes `kind` (autoencoders.py), whose weights and structure `weights_fingerprint` tells
    from all others.
    Without a `loader` its weights come with the job, and `arguments` are its file's metadata.
    A `text_encoder` is that of a CLIP, whose weights and structure `weights_fingerprint` tells from others.
    `partner` is the model of the negative prompt where a guider has two MODELs: both are loaded, split and placed as
    one, and `patches_fingerprint` identifies the patches on both.
    """

    loader: str
    arguments: str = "[]"
    index: int | None = None
    files: tuple[SourceFile, ...] = ()
    weight_dtype: str = "float32"
    compute_dtype: str = ""
    force_cast: bool = False
    dynamic_vram: bool = False
    patches_fingerprint: str = ""
    attributes: str = ""
    compilation: Compilation | None = None
    kind: str = ""
    weights_fingerprint: str = ""
    text_encoder: bool = False
    partner: ModelSpec | None = None

    @property
    def title(self) -> str:
        """The name shown to users: that of the file, or of the loader where there is none; of a VAE its class."""
        if self.kind:
            return self.kind.partition("(")[0].rpartition(".")[2]
        name = os.path.basename(self.files[0].path) if self.files else self.loader.rpartition(":")[2]
        return name if self.partner is None else f"{name}, {self.partner.title}"

    @property
    def part(self) -> tuple[bool, bool]:
        """Tells networks, VAEs and text encoders apart."""
        return bool(self.kind), self.text_encoder

    @property
    def unpatched(self) -> ModelSpec:
        """The spec of the loaded model, for all patches, attributes and compute dtypes, compiled or not."""
        partner = None if self.partner is None else self.partner.unpatched
        made = replace(self, patches_fingerprint="", attributes="", compute_dtype="", force_cast=False)
        return replace(made, compilation=None, partner=partner)

    @property
    def all_attributes(self) -> tuple[str, ...]:
        """The attributes of the model and of its partner."""
        return (self.attributes,) if self.partner is None else (self.attributes, *self.partner.all_attributes)

    @property
    def all_files(self) -> tuple[SourceFile, ...]:
        """The files of the model and of its partner."""
        return self.files if self.partner is None else (*self.files, *self.partner.all_files)

    @property
    def fingerprint(self) -> str:
        """Identifies the loaded model: files in two folders may have one name."""
        return hashlib.sha256(repr(self.unpatched).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class ComfySetup:
    """The host's ComfyUI: its checkout, its command-line flags, the folder that these name, and its version, "" for
    any. `compiles`: what workers are started for is compiled, so they make the compiler ready; others do not differ.
    `paths` are folders of the checkout that packs have put onto sys.path there."""

    root: str
    flags: tuple[str, ...] = ()
    folder: str = "/"
    version: str = ""
    compiles: bool = field(default=False, compare=False)
    paths: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The devices of a group: one torch device a rank, in rank order. A device may be named twice.

    With `nnodes` machines `devices` are this machine's, whose ranks come first, and every other machine has as many.
    The others connect to this one at `rdzv_endpoint`.
    """

    devices: tuple[str, ...]
    nnodes: int = 1
    rdzv_endpoint: str = ""

    @property
    def world_size(self) -> int:
        return len(self.devices) * self.nnodes

    @property
    def device_names(self) -> tuple[str, ...]:
        """The device of each rank, those of other machines with the machine's number."""
        machines = ["", *(f" of machine {number}" for number in range(2, self.nnodes + 1))]
        return tuple(f"{device}{machine}" for machine in machines for device in self.devices)

    @property
    def device_kind(self) -> str:
        """torch's name of the kind, such as "cuda" or "cpu"."""
        return self.devices[0].partition(":")[0]

    @property
    def shared(self) -> bool:
        return len(set(self.devices)) < len(self.devices)
