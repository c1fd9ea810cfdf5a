"""The models of this rank: loaded when a job names one, made parallel as the job asks, kept until the host says."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from ..blocks import blocks_of
from ..errors import Refused
from ..jobs import Job
from ..networks import Network
from ..specs import Compilation, ModelSpec, Parallelism, Storage
from ..stages import Seat, counts_of
from ..wire.messages import Run
from .engine.compiling import compile_blocks
from .engine.divide import divide, patches_of, undivide
from .engine.exchange import any_of
from .engine.memory import give_back_cache
from .engine.mesh import Axis, ContextMesh, World, build_mesh, with_own_group
from .engine.overriding import by_backend
from .engine.patches import Patches
from .engine.recording import Recording, Unrecordable  # noqa: F401 - for comfy_loop, which knows no engine
from .engine.stages import Elsewhere, Stages, settle, unsettle
from .lanes import Lanes, from_the_first, spread_rows
from .pulse import Pulse
from .ranks import refusing_together
from .spread import check_files
from .weights.places import Place, place
from .weights.store import Buffers

CPU = torch.device("cpu")

OnShare = Callable[[float], None]


@dataclass(eq=False)
class Model:
    """A network on this rank, and how it is cut just now; `architecture` is None where it can only run whole."""

    spec: ModelSpec
    network: nn.Module
    architecture: Network | None = None
    parallelism: Parallelism | None = None
    mesh: ContextMesh = field(default_factory=ContextMesh)
    compiled: tuple[Compilation, Callable[[], None]] | None = None  # and what makes it eager again
    stages: Stages | None = None
    elsewhere: Sequence[Seat] = ()  # of blocks, that other stages have
    division: ExitStack = field(default_factory=ExitStack)  # undoes in turn what cuts it
    device: torch.device = CPU  # that its evaluations run on
    recording: Recording = field(init=False)

    def __post_init__(self) -> None:
        self.recording = Recording(self.network, self.device, self.reach, self.known, self.objection)

    @property
    def name(self) -> str:
        return self.architecture.name if self.architecture else type(self.network).__name__

    @property
    def branches(self) -> Lanes:
        """The groups of ranks that share the branches of guidance."""
        return Lanes(self.mesh.cfg)

    def spread(
        self, evaluate: Callable[..., Any], batch: int, *args: Any, together: bool = False, **kwargs: Any
    ) -> Any:
        """`evaluate(*args, **kwargs)`, its rows spread over the lanes, but where something sees all of them `together`.
        The same bits on all ranks of the sequence."""
        rows = Lanes(Axis() if together else self.mesh.data)
        return from_the_first(self.mesh.context, spread_rows(rows, evaluate, batch, *args, **kwargs))

    def reach(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """What of a call's arguments the network can see. Raises Unrecordable."""
        return kwargs

    def known(self) -> Sequence[Any]:
        """Objects among them that are the same in each call."""
        return () if self.attention is None else (self.attention,)

    def objection(self) -> str:
        """Why no forward is to be recorded just now; "" for no reason."""
        if self.stages is not None:
            return "stages of a pipeline wait for each other in its middle"
        asked = self.compiled and self.compiled[0]
        return "torch.compile records it by itself" if asked and asked.records else ""

    @property
    def patches(self) -> Patches | None:
        """In which its evaluations go through stages."""
        return None if self.stages is None else self.stages.patches

    @property
    def cut_by_sequence(self) -> bool:
        return self.parallelism is not None and self.parallelism.cuts_tokens

    @property
    def attention(self) -> Callable[..., Any] | None:
        """ComfyUI's `optimized_attention_override` where a kernel was chosen and this rank holds whole sequences."""
        if self.parallelism is None or self.cut_by_sequence or self.parallelism.attention_backend == "auto":
            return None
        return by_backend(self.parallelism.attention_backend)

    def cut(self, mesh: ContextMesh, parallelism: Parallelism) -> None:
        """Every later forward runs over the context ranks of `mesh`."""
        self.compile(None)
        self.division.close()
        self.recording.drop()
        self.parallelism, self.mesh = None, mesh
        if parallelism.pipeline_degree > 1 and self.architecture is None:
            raise Refused(f"{self.name} cannot be cut into stages: set pipeline_degree to 1")
        self.divide(parallelism)
        self.parallelism = parallelism
        self.recording.choice = parallelism.cuda_graphs
        self.recording.agree = partial(any_of, mesh.context)

    def divide(self, parallelism: Parallelism) -> None:
        """By blocks, and those by sequence, until `division` is closed."""
        if self.architecture is None:
            if parallelism.cuts_tokens:
                raise Refused(f"{self.name} cannot be cut by sequence: set ring_degree and ulysses_degree to 1")
            return
        plan, staged = self.architecture.plan, parallelism.pipeline_degree > 1
        counts = counts_of(self.network, self.architecture, parallelism) if staged else ()
        if staged:
            self.rest()
            self.elsewhere = settle(self.network, plan, counts, self.mesh.pipeline.index)
            self.division.callback(self._unsettle)
        if parallelism.cuts_tokens:
            divide(self.network, plan, self.mesh, parallelism)
            self.division.callback(undivide, self.network)
        if staged:
            self.stages = Stages(self.network, plan, self.mesh.pipeline, counts, patches_of(self.network))
            self.division.callback(self.stages.remove)

    def _unsettle(self) -> None:
        self.rest()
        unsettle(self.elsewhere)
        self.stages, self.elsewhere = None, ()

    @property
    def away_bytes(self) -> int:
        """Of the weights, those that are not on the device of the others."""
        return 0

    @property
    def beside(self) -> Sequence[nn.Module]:
        """Other networks that came with it in its last job."""
        return ()

    def keep(self, place: Place | None) -> None:
        """Have the weights at rest there; None: whole on the device."""
        assert place is None, f"{self.name} is only whole"

    def compile(self, compilation: Compilation | None) -> None:
        """Every later forward runs compiled, block by block where the network's blocks are known; None for eager."""
        if (self.compiled and self.compiled[0]) == compilation:
            return
        if self.compiled is not None:
            _, undo = self.compiled
            undo()
        self.compiled = None
        self.recording.drop()
        self.recording.compiled = compilation is not None
        if compilation is not None:
            blocks = (
                blocks_of(self.network, self.architecture.plan, carrying=True) if self.architecture else [self.network]
            )
            here = [block for block in blocks if not isinstance(block, Elsewhere)]
            self.compiled = compilation, compile_blocks(here, compilation)

    def rest(self) -> None:
        """Give the device's memory back; the next job wakes it."""
        self.recording.drop()
        self.network.to("cpu")

    def wake(self, device: torch.device) -> None:
        self.network.to(device)


Load = Callable[[ModelSpec, torch.device, OnShare, Job], Model]
Loop = Callable[[Any, Any, Pulse], dict[str, Any]]  # what runs a kind of job on a Model
VAE = "vae"  # the loader of all of them


class Models:
    """Holds models and VAEs by what was loaded. Meshes are kept, so that groups are built once a shape.

    `loaders` go by the specs' `loader`; "" is for all others, and VAE for VAEs.
    """

    def __init__(self, device: torch.device, loaders: Mapping[str, Load]) -> None:
        self.world = World()
        self._device = device
        self._loaders = loaders
        self._models: dict[ModelSpec, Model] = {}
        self._meshes: dict[tuple[int, ...], ContextMesh] = {}
        self._axes: dict[tuple[int, ...], Axis] = {}
        self._places: dict[tuple[Storage, tuple[int, ...]], Place | None] = {}
        self._buffers = Buffers(device)

    def get(self, request: Run, on_share: OnShare, job: Job) -> Model:
        """The model that `request` names for `job`, cut and kept as it says. Loads and cuts anew only what differs."""
        spec, parallelism = request.model, request.parallelism
        if spec.unpatched not in self._models:
            with refusing_together():
                loaded = self._load(spec, on_share, job)
            self._models[spec.unpatched] = loaded
        model = self._models[spec.unpatched]
        model.spec = spec
        model.wake(self._device)
        if model.parallelism != parallelism:
            model.cut(self.mesh(parallelism), parallelism)
        model.keep(self._place(request.storage, parallelism))
        model.compile(spec.compilation)
        return model

    @property
    def loaded(self) -> list[Model]:
        return list(self._models.values())

    def let_go(self, spec: ModelSpec, *, offload: bool) -> None:
        """Give back the memory of this model, if it is here; but for an `offload`, which a job may wake, forget it."""
        if model := self._models.get(spec.unpatched) if offload else self._models.pop(spec.unpatched, None):
            model.rest()
        del model
        self._give_back()

    def rest(self, *, briefly: bool = False) -> None:
        """After a job nothing is on its way. Unless the next is a moment away, give back what only a run needs."""
        self._buffers.rest()
        if not briefly:
            self._buffers.give_back()
            give_back_cache(self._device)

    def recover(self) -> None:
        """After a job that was refused in its middle: nothing is on its way, and nobody holds its tensors."""
        self._buffers.rest()
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        self._give_back()

    def _give_back(self) -> None:
        gc.collect()
        self.rest()

    def _load(self, spec: ModelSpec, on_share: OnShare, job: Job) -> Model:
        check_files(spec.files)
        name = VAE if spec.kind else spec.loader
        return self._loaders[name if name in self._loaders else ""](spec, self._device, on_share, job)

    def _place(self, storage: Storage, parallelism: Parallelism) -> Place | None:
        """Parts are gathered over a communicator of their own, which costs all others nothing. Collective when new."""
        gathered = storage.mode == "shard"
        key = (storage, parallelism.dims if gathered else ())
        if key not in self._places:
            axis = self._axis(parallelism) if gathered else Axis()
            self._places[key] = place(storage, axis, self._device, self._buffers)
        return self._places[key]

    def _axis(self, parallelism: Parallelism) -> Axis:
        shape = parallelism.dims
        if shape not in self._axes:
            self._axes[shape] = with_own_group(self.mesh(parallelism).context, self._device)
        return self._axes[shape]

    def mesh(self, parallelism: Parallelism) -> ContextMesh:
        """The mesh of this shape, with these shares. Collective when the shape is new."""
        shape = parallelism.dims
        if shape not in self._meshes:
            self._meshes[shape] = build_mesh(parallelism, self._device, self.world)
        return self._meshes[shape].shared(parallelism.shares)
