"""The models of this rank: loaded when a job names one, parallelized as it asks, and kept until the host frees them."""

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ..architectures import Architecture
from ..architectures.network_modules import blocks_of
from ..architectures.row_plan import RowPlan
from ..engine.attention.attention_override import backend_override
from ..engine.comm.collectives import all_to_all, any_rank, differing_ranks, refuse_on_all_ranks
from ..engine.comm.mesh import ContextMesh, GroupState, MeshDim, build_mesh, end_groups, with_new_group
from ..engine.comm.ranks import BlockCounter, can_allocate, empty_cache, machine, machine_count, rank
from ..engine.cuda_graphs import compile_blocks
from ..engine.graph_runner import GraphRunner
from ..engine.parallelize import parallelize, unparallelize
from ..engine.prefetch import Buffers, RankPlacement, rank_placement
from ..engine.stages import PlaceholderBlock, Stages
from ..errors import Refused
from ..jobs import Job
from ..loading.fingerprint import check_unchanged, file_fingerprint
from ..request import AfterSampling
from ..specs import Compilation, ModelSpec, Parallelism, SourceFile, WeightPlacement
from ..wire.messages import Run
from .batch_groups import broadcast_if_unlike, data_parallel
from .progress import Progress

CPU = torch.device("cpu")
IDLE_MESHES = 2  # kept beside those that models are split over: users go back to degrees that they had

OnProgress = Callable[[float], None]


@dataclass(eq=False)
class Model:
    """A network on this rank, and how it is split now; `architecture` is None for one that only runs undivided, and
    `split_done` is false until the split that `parallelism` describes has succeeded."""

    spec: ModelSpec
    network: nn.Module
    architecture: Architecture | None = None
    parallelism: Parallelism = field(default_factory=Parallelism)
    split_done: bool = False
    attributes: tuple[str, ...] = ("",)  # as `set_attributes` has set them: ModelSpec.all_attributes
    mesh: ContextMesh = field(default_factory=ContextMesh)
    compilation: Compilation | None = None  # None: it is eager
    undo_compilation: ExitStack = field(default_factory=ExitStack)  # closing it makes the network eager
    stages: Stages | None = None
    undo_split: ExitStack = field(default_factory=ExitStack)  # closing it makes the network undivided
    device: torch.device = CPU  # its evaluations run here
    cond_arguments: dict[int, dict[str, Any]] = field(default_factory=dict)  # of EvaluationJobs, by cond_number
    graph_runner: GraphRunner = field(init=False)

    def __post_init__(self) -> None:
        self.graph_runner = GraphRunner(
            self.network, self.device, eager_reason=self.unrecordable_reason, before_timing=self.stop_comm_timer
        )

    @property
    def name(self) -> str:
        return self.architecture.name if self.architecture else type(self.network).__name__

    def data_parallel(
        self, evaluate: Callable[..., Any], batch: int, *args: Any, batch_coupled: bool = False, **kwargs: Any
    ) -> Any:
        """Calls `evaluate(*args, **kwargs)` with its entries divided over the batch groups; each group computes
        all entries of a `batch_coupled` batch. The result has the same bits on all ranks of a sequence."""
        dim = MeshDim() if batch_coupled else self.mesh.data
        return broadcast_if_unlike(self.mesh.context, data_parallel(dim, evaluate, batch, *args, **kwargs))

    def unrecordable_reason(self) -> str:
        """Returns why no forward can be recorded now; "" where it can."""
        if self.stages is not None:
            return "stages of a pipeline wait for each other in its middle"
        if self.mesh.context.comm_device is not None:
            return "its ranks exchange tensors through main memory"
        makes_graphs = self.compilation is not None and self.compilation.makes_graphs
        return "torch.compile records it by itself" if makes_graphs else ""

    def stop_comm_timer(self) -> None:
        """Stops timing communication until the next step."""
        self.mesh.context.group_state.comm_timer = None

    @property
    def attention(self) -> Callable[..., Any] | None:
        """Returns an `optimized_attention_override` where the user chose a kernel and this rank has full sequences."""
        backend = self.parallelism.options.attention_backend
        return None if self.parallelism.splits_tokens or backend == "auto" else backend_override(backend)

    def parallelize(self, mesh: ContextMesh, parallelism: Parallelism) -> None:
        """Splits the network over `mesh`, with the attributes of `spec`, for every later forward."""
        self.compile(None)
        self.undo_split.close()
        self.graph_runner.discard()
        self.split_done = False
        self.set_attributes(self.spec.attributes)
        self.attributes = self.spec.all_attributes
        self.parallelism, self.mesh = parallelism, mesh
        self.split(parallelism)
        self.split_done = True
        self.graph_runner.choice = parallelism.options.cuda_graphs
        self.graph_runner.any_rank = partial(any_rank, dim=mesh.context)

    def split(self, parallelism: Parallelism) -> None:
        """Splits blocks over stages, tokens over ranks, until `undo_split` is closed. It has been checked before."""
        staged = parallelism.pipeline_degree > 1
        if not staged and not parallelism.splits_tokens:
            return
        assert self.architecture is not None
        plan = self.architecture.plan
        if staged:
            self.offload()
            self.stages = self.undo_split.enter_context(Stages(self.network, plan, self.mesh, parallelism))
            self.undo_split.callback(setattr, self, "stages", None)
            self.undo_split.callback(self.offload)
        else:
            parallelize(self.network, plan, self.mesh, parallelism)
            self.undo_split.callback(unparallelize, self.network)

    def set_attributes(self, attributes: str) -> None:
        """Sets these attributes (of a ModelSpec) of the undivided model, and those set before to what they were."""
        assert not attributes, f"{self.name} has no attributes to set"

    @property
    def nonresident_bytes(self) -> int:
        """Returns the bytes of the weights that are offloaded, or on other ranks, while the rest is on the device."""
        return 0

    @property
    def additional_weights(self) -> Sequence[torch.Tensor]:
        """Returns the weights of other models (model patches, ControlNets) that its last job used."""
        return ()

    def place_weights(self, placement: RankPlacement | None) -> None:
        """Keeps the weights there between forwards; None replicates them on the device."""
        assert placement is None, f"{self.name} can only be replicated"

    def compile(self, compilation: Compilation | None) -> None:
        """Compiles every later forward, block by block where the blocks are known; None makes it eager."""
        if self.compilation == compilation:
            return
        self.undo_compilation.close()
        self.compilation = None
        self.graph_runner.discard()
        self.graph_runner.compiled = compilation is not None
        if compilation is not None:
            plan = self.architecture.plan if self.architecture else None
            if plan is None or isinstance(plan, RowPlan):  # ComfyUI's process never asks for rows with a compilation
                blocks = [self.network]
            else:
                blocks = blocks_of(self.network, plan, carrying=True)
            local = [block for block in blocks if not isinstance(block, PlaceholderBlock)]
            self.undo_compilation.callback(compile_blocks(local, compilation))
            self.compilation = compilation

    def offload(self) -> None:
        """Moves the weights to main memory; the next job moves them back with `onload`."""
        self.graph_runner.discard()
        self.network.to("cpu")

    def onload(self) -> None:
        self.network.to(self.device)

    def give_back(self, nbytes: int) -> None:
        """Moves weights of at least so many bytes to main memory, if it can, until the next job."""


Load = Callable[[ModelSpec, torch.device, OnProgress, Job], Model]
Loop = Callable[[Any, Any, Progress], dict[str, Any]]  # runs jobs of one kind on a Model
JobKinds = dict[type, tuple[Load, Loop]]


class Models:
    """The models and VAEs of this rank, by their specs without patches. The meshes of their degrees are kept, and those
    that were used last: to make communicators takes time, and each takes memory of a GPU.

    `loaders` are by the kind of the job that needs a model."""

    def __init__(self, device: torch.device, loaders: Mapping[type, Load]) -> None:
        self.group_state = GroupState()
        self.block_counter = BlockCounter(device)
        self._device = device
        self._loaders = loaders
        self._models: dict[ModelSpec, Model] = {}
        self._meshes: dict[tuple[int, ...], ContextMesh] = {}
        self._shard_dims: dict[tuple[int, ...], MeshDim] = {}
        self._placements: dict[tuple[WeightPlacement, tuple[int, ...]], RankPlacement | None] = {}
        self._buffers = Buffers(device)

    def get(self, request: Run, on_progress: OnProgress, job: Job) -> Model:
        """Returns the model that `request` names for `job`, split and placed as it says; redoes only what differs."""
        spec, parallelism = request.model, request.parallelism
        if spec.unpatched not in self._models:
            # A rank that alone has another file, or no memory for it, would leave the others waiting.
            with refuse_on_all_ranks():
                check_files(spec.all_files)
            with refuse_on_all_ranks():
                loaded = self._loaders[type(job)](spec, self._device, on_progress, job)
            self.block_counter.watch(loaded.network)
            self._models[spec.unpatched] = loaded
        model = self._models[spec.unpatched]
        model.spec = spec
        model.onload()
        split_as = (model.parallelism.without_run_options, model.attributes)
        if not model.split_done or split_as != (parallelism.without_run_options, spec.all_attributes):
            model.parallelize(self.mesh(parallelism), parallelism)
        model.parallelism = parallelism
        model.place_weights(self._placement(request.weight_placement, parallelism))
        model.compile(spec.compilation)
        # Other models' recordings give way to the first evaluations of a model without any, where these may need their
        # memory. Collective where there are other models.
        other_runners = [other.graph_runner for other in self.loaded if other is not model]
        model.graph_runner.other_models_bytes = partial(self._recorded_bytes, but=model)
        recorded = self._recorded_bytes(but=model)
        first = model.graph_runner.stats.keys == 0
        if other_runners and any_rank(first and not can_allocate(self._device, recorded, recorded)):
            for runner in other_runners:
                runner.discard()
            empty_cache(self._device)
        self._end_idle_meshes()
        return model

    def _recorded_bytes(self, *, but: Model) -> int:
        return sum(other.graph_runner.stats.bytes for other in self.loaded if other is not but)

    @property
    def loaded(self) -> list[Model]:
        return list(self._models.values())

    def free(self, spec: ModelSpec, after: AfterSampling) -> None:
        """Drops the conditions of this model's run, if it is loaded. `offload` also moves its weights to main memory,
        until a job needs them; `unload` drops the model."""
        model = self._models.pop(spec.unpatched, None) if after == "unload" else self._models.get(spec.unpatched)
        if model is not None:
            model.cond_arguments.clear()
            if after != "keep":
                model.offload()
        # The last reference: only without it can the weights' memory be freed.
        del model
        self._free_unused()

    def discard_recordings(self, spec: ModelSpec, nbytes: int = 0) -> None:
        """Discards this model's recorded forwards, if it is loaded, and gives back `nbytes` of the device that its
        weights take; the next job records the forwards again, and brings these weights back."""
        if model := self._models.get(spec.unpatched):
            model.graph_runner.discard()
            model.give_back(nbytes)
        self._free_unused()

    def end_job(self, *, keep_buffers: bool = False) -> None:
        """Discards fetched weights and, unless `keep_buffers`, frees the memory that only a run needs."""
        self._buffers.discard_fetched()
        if not keep_buffers:
            self._buffers.free()
            empty_cache(self._device)

    def recover(self) -> None:
        """Waits for the device and frees the tensors of a job that was refused in its middle."""
        self._wait_for_device()
        self._free_unused()

    def _wait_for_device(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _free_unused(self) -> None:
        gc.collect()
        self.end_job()

    def _placement(self, placement: WeightPlacement, parallelism: Parallelism) -> RankPlacement | None:
        """Shards are gathered over a communicator of their own, which delays no other one. Collective when new."""
        sharded = placement.mode == "shard"
        shape, dim = (parallelism.mesh_shape, self._shard_dim(parallelism)) if sharded else ((), MeshDim())
        if (placement, shape) not in self._placements:
            self._placements[placement, shape] = rank_placement(placement, dim, self._device, self._buffers)
        return self._placements[placement, shape]

    def _shard_dim(self, parallelism: Parallelism) -> MeshDim:
        shape = parallelism.mesh_shape
        if shape not in self._shard_dims:
            self._shard_dims[shape] = with_new_group(self.mesh(parallelism).context, self._device)
        return self._shard_dims[shape]

    def connect(self, parallelism: Parallelism, *, sharded: bool) -> None:
        """Makes the communicators of these degrees, and has each exchange something: NCCL takes its buffers with the
        first exchange, and a plan counts what is free after that. Collective when they are new."""
        shape = parallelism.mesh_shape
        dims = [] if shape in self._meshes else self.mesh(parallelism).dims
        dims += [self._shard_dim(parallelism)] if sharded and shape not in self._shard_dims else []
        for dim in {dim.group: dim for dim in dims if dim.size > 1}.values():
            blocks = torch.zeros(dim.size, device=self._device)
            all_to_all(blocks, torch.empty_like(blocks), None, None, dim).wait()
        self._wait_for_device()

    def mesh(self, parallelism: Parallelism) -> ContextMesh:
        """Returns the mesh of these degrees, with these shares. Collective when the degrees are new."""
        shape = parallelism.mesh_shape
        built = self._meshes.pop(shape, None) or build_mesh(parallelism, self._device, self.group_state)
        self._meshes[shape] = built  # the last one
        return built.with_shares(parallelism.shares)

    def _end_idle_meshes(self) -> None:
        """Destroys communicators of degrees that no model is split by; a recorded graph that used them is discarded by
        then. Collective: all ranks have had the same requests, and so the same meshes in the same order."""
        used = {model.parallelism.mesh_shape for model in self.loaded}
        idle = [shape for shape in self._meshes if shape not in used][:-IDLE_MESHES]
        if idle:
            self._wait_for_device()
            any_rank(False)  # the others have no work left on them either
        for shape in idle:
            weights = self._shard_dims.pop(shape, None)
            end_groups([*self._meshes.pop(shape).dims, *([weights] if weights else [])])
            self._placements = {key: value for key, value in self._placements.items() if key[1] != shape}


def check_files(files: Sequence[SourceFile]) -> None:
    """Raises Refused for the first file that has changed since it was described, or, on another machine than
    ComfyUI's, is missing or another file than there. Collective where there are several machines."""
    several = machine_count() > 1
    # By samples of the weights: files of one architecture may have equal names and sizes. Times may differ.
    found = [file_fingerprint(file.path) if several and os.path.isfile(file.path) else "" for file in files]
    # All of them before a refusal: one that refused would leave the other ranks waiting in the next comparison.
    differing = [differing_ranks(each) if several else [] for each in found]
    for file, other_ranks in zip(files, differing, strict=True):
        if several and not os.path.isfile(file.path):
            raise Refused("file.missing", path=file.path)
        if rank() in other_ranks:
            raise Refused("file.other", path=file.path)
        if machine() == 0:
            check_unchanged(file)
