"""This rank's place among pipeline x data x cfg x ring x ulysses ranks, with the groups to talk to: built once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...specs import Parallelism
from .ranks import CommTimer

BATCH_DIMS = ("data", "cfg")  # mesh dimensions along which images and prompts are split, not tokens
MESH_DIMS = ("pipeline", *BATCH_DIMS, "ring", "ulysses")

Parts = int | tuple[int, ...]  # the number of equal parts, or each part's share


@dataclass(eq=False)
class GroupState:
    """What this rank measures as long as its group lives.

    `working_kernels`: whether all of some ranks have a kernel that computes a kind of attention correctly (see
    `choose_kernel`). `waited_seconds`: how long the process waited for transfers (None: not measured). `comm_timer`
    measures the device's waits if set. `heterogeneous`: the ranks' devices differ, so they round differently and may
    draw other random numbers."""

    working_kernels: dict[tuple[Any, ...], bool] = field(default_factory=dict)
    waited_seconds: float | None = None
    comm_timer: CommTimer | None = None
    heterogeneous: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class MeshDim:
    """The ranks along one dimension of the mesh: how many, which one this is, their global ranks and group (None: a
    single rank).

    `comm_device` is where collectives need their tensors if they cannot use this rank's device (None: they can).
    `group_state` is one object for all dimensions of a group. Work along this one is split by `shares`, one a rank; ()
    for equal parts."""

    size: int = 1
    index: int = 0
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None
    comm_device: torch.device | None = None
    group_state: GroupState = field(default_factory=GroupState)
    shares: tuple[int, ...] = ()

    @property
    def parts(self) -> Parts:
        return self.shares or self.size

    @property
    def other_ranks(self) -> list[int]:
        """Returns the indices of the other ranks, starting after this one: so each rank starts with another peer."""
        return [(self.index + step) % self.size for step in range(1, self.size)]


@dataclass(frozen=True, kw_only=True, eq=False)
class ContextMesh:
    """`context` is ring and ulysses together, ring-major: the ranks that share one sequence. `pipeline` is those that
    have the same place in each stage.

    `device_mesh` is the one-dim DeviceMesh of the context ranks (None: a single rank), to shard weights over them."""

    pipeline: MeshDim = field(default_factory=MeshDim)
    data: MeshDim = field(default_factory=MeshDim)
    cfg: MeshDim = field(default_factory=MeshDim)
    ring: MeshDim = field(default_factory=MeshDim)
    ulysses: MeshDim = field(default_factory=MeshDim)
    context: MeshDim = field(default_factory=MeshDim)
    device_mesh: DeviceMesh | None = None

    @property
    def dims(self) -> list[MeshDim]:
        return [*(getattr(self, name) for name in MESH_DIMS), self.context]

    def with_shares(self, shares: tuple[int, ...]) -> ContextMesh:
        """Returns the mesh with the `shares` of a Parallelism, one a rank; () for equal shares.

        Tokens follow each rank's own share, heads the shares of all ring ranks that have them, and entries of a batch
        those of all ranks of a data group. Every batch group has as many prompts. Stages of a pipeline split alike."""
        ranks = self.data.size * self.cfg.size * self.context.size
        shares = tuple(sum(shares[place::ranks]) for place in range(ranks)) if shares else (1,) * ranks
        group = self.data.index * self.cfg.size + self.cfg.index
        own = shares[group * self.context.size :][: self.context.size]
        of_heads = tuple(sum(own[place :: self.ulysses.size]) for place in range(self.ulysses.size))
        each = self.cfg.size * self.context.size
        of_entries = tuple(sum(shares[first : first + each]) for first in range(0, len(shares), each))
        context, ulysses = replace(self.context, shares=own), replace(self.ulysses, shares=of_heads)
        return replace(self, context=context, ulysses=ulysses, data=replace(self.data, shares=of_entries))


def build_mesh(
    parallelism: Parallelism, device: torch.device | None = None, group_state: GroupState | None = None
) -> ContextMesh:
    """Returns the mesh of a group of `parallelism.world_size` ranks that compute on `device`; `group_state` is the one
    so far.

    Every rank of the group must call it together, once per shape: groups are made here. A world of one rank needs
    no process group. Raises ValueError when the degrees and the group disagree."""
    single_rank = MeshDim(group_state=group_state or GroupState())
    if parallelism.world_size == 1:
        return ContextMesh(context=single_rank)
    degrees = " x ".join(f"{name} {getattr(parallelism, f'{name}_degree')}" for name in MESH_DIMS)
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
    device = device or torch.device("cpu")
    comm_device = comm_device_of(device)
    # A dim of one rank gets no group: each communicator takes memory of a GPU.
    sizes = {name: size for name, size in zip(MESH_DIMS, parallelism.mesh_shape, strict=True) if size > 1}
    mesh = init_device_mesh((comm_device or device).type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    mesh_dims = {name: mesh_dim_of(mesh[name].get_group(), comm_device, single_rank.group_state) for name in sizes}
    # Ring and Ulysses together have a group of their own only where no other group has these ranks.
    parts = [mesh_dims[name] for name in ("ring", "ulysses") if name in mesh_dims]
    if len(parts) < 2:
        context = parts[0] if parts else single_rank
    else:
        group = dist.group.WORLD if len(mesh_dims) == 2 else mesh["ring", "ulysses"]._flatten().get_group()
        assert group is not None
        context = mesh_dim_of(group, comm_device, single_rank.group_state)
    flat = None if context.group is None else DeviceMesh.from_group(context.group, mesh.device_type)
    for mesh_dim in (*mesh_dims.values(), context):
        _copy_world_timeout(mesh_dim, device)
    return ContextMesh(**mesh_dims, context=context, device_mesh=flat).with_shares(parallelism.shares)


def with_new_group(mesh_dim: MeshDim, device: torch.device) -> MeshDim:
    """Returns the same ranks on a communicator of their own, which waits for nothing else that they send. Collective
    over the world, in which the ranks of such a mesh dimension are neighbours."""
    if mesh_dim.size == 1:
        return mesh_dim
    firsts = range(0, dist.get_world_size(), mesh_dim.size)  # every rank makes all groups: new_group is collective
    groups = [dist.new_group(list(range(first, first + mesh_dim.size))) for first in firsts]
    dim = replace(mesh_dim, group=groups[dist.get_rank() // mesh_dim.size])
    assert tuple(dist.get_process_group_ranks(dim.group)) == mesh_dim.ranks
    _copy_world_timeout(dim, device)
    return dim


def end_groups(mesh_dims: Sequence[MeshDim]) -> None:
    """Destroys the communicators of these dimensions, except the world's. No work may be left on them. Collective."""
    for group in dict.fromkeys(dim.group for dim in mesh_dims):
        if group is not None and group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def participating_ranks(sizes: Sequence[int], device: torch.device) -> MeshDim | None:
    """Returns the ranks, of the first ones of the world, that have a nonzero size in `sizes`, with these as their
    shares; they compute on `device`. None where this rank is none of them.

    No group is made: point to point, and so in everything in collectives.py, any ranks of the world may talk."""
    ranks = tuple(rank for rank, size in enumerate(sizes) if size)
    own = dist.get_rank() if dist.is_initialized() else 0
    if own not in ranks:
        return None
    shares, comm_device = tuple(size for size in sizes if size), comm_device_of(device)
    return MeshDim(size=len(ranks), index=ranks.index(own), ranks=ranks, shares=shares, comm_device=comm_device)


def _copy_world_timeout(mesh_dim: MeshDim, device: torch.device) -> None:
    """Gives the mesh dimension's group the timeout of the world group; a new subgroup has PyTorch's default."""
    assert dist.group.WORLD is not None
    backend_device = mesh_dim.comm_device or device
    timeout = getattr(dist.group.WORLD._get_backend(backend_device).options, "_timeout", None)
    if mesh_dim.group is not None and mesh_dim.group is not dist.group.WORLD and isinstance(timeout, timedelta):
        mesh_dim.group._get_backend(backend_device)._set_default_timeout(timeout)


def mesh_dim_of(group: dist.ProcessGroup, comm_device: torch.device | None, state: GroupState) -> MeshDim:
    """Returns the MeshDim of the ranks of `group`."""
    ranks, index = tuple(dist.get_process_group_ranks(group)), dist.get_rank(group)
    return MeshDim(size=len(ranks), index=index, ranks=ranks, group=group, comm_device=comm_device, group_state=state)


def comm_device_of(device: torch.device) -> torch.device | None:
    """Returns the `comm_device` of ranks that compute on `device`: the CPU for gloo, as where they share a GPU."""
    if device.type == "cpu" or not dist.is_initialized():
        return None
    backends = dict(part.split(":") for part in dist.get_backend_config().split(","))
    return torch.device("cpu") if backends.get(device.type, "gloo") == "gloo" else None
