"""This rank's place among pipeline x data x cfg x ring x ulysses ranks, with the groups to talk to.

Built once, then frozen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...specs import Parallelism
from .moments import Standstill

LANES = ("data", "cfg")  # axes along which whole evaluations are shared out
AXES = ("pipeline", *LANES, "ring", "ulysses")

Parts = int | tuple[int, ...]  # how many alike, or the share of each


@dataclass(eq=False)
class World:
    """What this rank learns as long as its group lives: the seconds of kernels that have raced, by who raced with what;
    of which it has advised; how long it has stood still for transfers (None: nobody could see), and, where somebody
    watches, how long its device has. `unlike`: the ranks' devices are of several kinds, which round in different ways,
    and may draw other random numbers."""

    races: dict[tuple[Any, ...], dict[str, float]] = field(default_factory=dict)
    advised: set[str] = field(default_factory=set)
    waited_seconds: float | None = None
    standstill: Standstill | None = None
    unlike: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Axis:
    """The ranks along one axis: how many, which one this is, their global ranks and group (None: this rank alone).

    `wire` is where collectives want their tensors when they cannot take this rank's own (None: they can). `world` is
    the same for all axes of a group. What is shared out along the axis goes by `shares`, one a rank; by none all get
    alike.
    """

    size: int = 1
    index: int = 0
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None
    wire: torch.device | None = None
    world: World = field(default_factory=World)
    shares: tuple[int, ...] = ()

    @property
    def parts(self) -> Parts:
        return self.shares or self.size

    @property
    def others(self) -> list[int]:
        """All but this one, those after it first: who begins so begins with another peer than all others do."""
        return [(self.index + step) % self.size for step in range(1, self.size)]


@dataclass(frozen=True, kw_only=True, eq=False)
class ContextMesh:
    """`context` is ring and ulysses together, ring-major: the ranks that share one sequence. `pipeline` is those that
    have the same place in each stage.

    `flat` is the one-dim DeviceMesh of the context ranks (None: alone), for sharding weights over them.
    """

    pipeline: Axis = field(default_factory=Axis)
    data: Axis = field(default_factory=Axis)
    cfg: Axis = field(default_factory=Axis)
    ring: Axis = field(default_factory=Axis)
    ulysses: Axis = field(default_factory=Axis)
    context: Axis = field(default_factory=Axis)
    flat: DeviceMesh | None = None

    @property
    def lanes(self) -> int:
        """How many times there are ranks that share a sequence."""
        return self.data.size * self.cfg.size

    def shared(self, shares: tuple[int, ...]) -> ContextMesh:
        """The same ranks with these shares of a Parallelism; none: all alike.

        Tokens go by each rank's own. Heads go by the shares of all ranks that have them, since a ring's keep theirs,
        and rows of a batch by those of all ranks of a lane. Of prompts each lane has as many. Stages of a pipeline cut
        alike.
        """
        ranks = self.lanes * self.context.size
        shares = tuple(sum(shares[place::ranks]) for place in range(ranks)) if shares else (1,) * ranks
        lane = self.data.index * self.cfg.size + self.cfg.index
        own = shares[lane * self.context.size :][: self.context.size]
        of_heads = tuple(sum(own[place :: self.ulysses.size]) for place in range(self.ulysses.size))
        each = self.cfg.size * self.context.size
        of_rows = tuple(sum(shares[first : first + each]) for first in range(0, len(shares), each))
        return replace(
            self,
            context=replace(self.context, shares=own),
            ulysses=replace(self.ulysses, shares=of_heads),
            data=replace(self.data, shares=of_rows),
        )


def build_mesh(parallelism: Parallelism, device: torch.device | None = None, world: World | None = None) -> ContextMesh:
    """The mesh of a group of `parallelism.world_size` ranks that compute on `device`; `world` is the group's so far.

    Every rank of the group must call it together, once per shape: groups are made here. A world of one rank needs
    no process group. Raises ValueError when the degrees and the group disagree.
    """
    alone = Axis(world=world or World())
    if parallelism.world_size == 1:
        return ContextMesh(context=alone)
    degrees = _degrees(parallelism)
    if not dist.is_initialized():
        raise ValueError(
            f"{degrees} needs {parallelism.world_size} ranks, but there is no process group; launch with torchrun and "
            "call torch.distributed.init_process_group first"
        )
    if dist.get_world_size() != parallelism.world_size:
        raise ValueError(
            f"{degrees} makes {parallelism.world_size} ranks, but the group has {dist.get_world_size()}; change the "
            "degrees, or pass a DeviceMesh with one more dim for the other ranks"
        )
    wire = wire_of(device or torch.device("cpu"))
    sizes = {name: size for name, size in zip(AXES, parallelism.dims, strict=True) if size > 1}
    mesh = init_device_mesh(wire.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    staged = wire if device is not None and wire.type != device.type else None
    axes = {name: axis_of(mesh[name].get_group(), staged, alone.world) for name in sizes}
    context = _context(mesh, axes, staged, alone)
    flat = DeviceMesh.from_group(context.group, wire.type) if context.group is not None else None
    for axis in (*axes.values(), context):
        _as_patient_as_the_world(axis, wire)
    return ContextMesh(**axes, context=context, flat=flat).shared(parallelism.shares)


def with_own_group(axis: Axis, device: torch.device) -> Axis:
    """The same ranks on a communicator of their own, which waits for nothing else that they send. Collective over the
    world, in which the ranks of such an axis are neighbours."""
    if axis.size == 1:
        return axis
    groups = [
        dist.new_group(list(range(first, first + axis.size))) for first in range(0, dist.get_world_size(), axis.size)
    ]
    made = replace(axis, group=groups[dist.get_rank() // axis.size])
    assert tuple(dist.get_process_group_ranks(made.group)) == axis.ranks
    _as_patient_as_the_world(made, wire_of(device))
    return made


def first_ranks(count: int, device: torch.device) -> Axis:
    """The first `count` ranks of the world, of which this must be one; they compute on `device`.

    No group is made: point to point, and so in everything in exchange.py, any ranks of the world may talk.
    """
    wire = wire_of(device)
    index = dist.get_rank() if dist.is_initialized() else 0
    assert index < count
    staged = wire if wire.type != device.type else None
    return Axis(size=count, index=index, ranks=tuple(range(count)), wire=staged)


def ranks_with(sizes: Sequence[int], device: torch.device) -> Axis | None:
    """Of the first ranks of the world those for whom there is something, with `sizes` as their shares; None where this
    is none of them. As `first_ranks`."""
    everybody = first_ranks(len(sizes), device)
    taking = tuple(rank for rank, size in enumerate(sizes) if size)
    if everybody.index not in taking:
        return None
    shares = tuple(size for size in sizes if size)
    return replace(everybody, size=len(taking), index=taking.index(everybody.index), ranks=taking, shares=shares)


def _context(mesh: DeviceMesh, axes: Mapping[str, Axis], wire: torch.device | None, alone: Axis) -> Axis:
    """Ring and Ulysses together; a group of its own only where no other has just these ranks."""
    parts = [axes[name] for name in ("ring", "ulysses") if name in axes]
    if len(parts) < 2:
        return parts[0] if parts else alone
    if len(axes) == 2:
        assert dist.group.WORLD is not None
        return axis_of(dist.group.WORLD, wire, alone.world)
    return axis_of(mesh["ring", "ulysses"]._flatten().get_group(), wire, alone.world)


def _as_patient_as_the_world(axis: Axis, wire: torch.device) -> None:
    """A group made of another has PyTorch's timeout, not that which the world was given."""
    assert dist.group.WORLD is not None
    timeout = getattr(dist.group.WORLD._get_backend(wire).options, "_timeout", None)
    if axis.group is not None and axis.group is not dist.group.WORLD and isinstance(timeout, timedelta):
        axis.group._get_backend(wire)._set_default_timeout(timeout)


def axis_of(group: dist.ProcessGroup, wire: torch.device | None, world: World) -> Axis:
    """Of the ranks of `group`, which it takes `wire` to talk to."""
    ranks = tuple(dist.get_process_group_ranks(group))
    return Axis(size=len(ranks), index=dist.get_rank(group), ranks=ranks, group=group, wire=wire, world=world)


def wire_of(device: torch.device) -> torch.device:
    """Where collectives take tensors: gloo moves CPU tensors only, also for ranks that share one GPU."""
    if device.type == "cpu" or not dist.is_initialized():
        return device
    backends = dict(part.split(":") for part in dist.get_backend_config().split(","))
    return torch.device("cpu") if backends.get(device.type, "gloo") == "gloo" else device


def _degrees(parallelism: Parallelism) -> str:
    return " x ".join(f"{name} {getattr(parallelism, f'{name}_degree')}" for name in AXES)
