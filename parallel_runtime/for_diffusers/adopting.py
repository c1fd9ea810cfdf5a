"""Converts what a caller of diffusers has: PyTorch's DeviceMesh, diffusers' ContextParallelConfig."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..engine.comm.mesh import BATCH_DIMS, MESH_DIMS, ContextMesh, GroupState, build_mesh, comm_device_of, mesh_dim_of
from ..request import EngineOptions
from ..specs import Parallelism


def from_context_parallel_config(config: Any) -> Parallelism:
    """Returns the Parallelism that a diffusers ContextParallelConfig (or a ParallelConfig around one) asks for.

    `ulysses_anything` and `ring_anything` are always on here. A mesh in it goes to `attach`.
    """
    config = getattr(config, "context_parallel_config", config)
    mesh = getattr(config, "mesh", None)
    return Parallelism(
        ring_degree=config.ring_degree or 1,
        ulysses_degree=config.ulysses_degree or 1,
        cfg_degree=1 if mesh is None else _size(mesh, "cfg"),
        options=EngineOptions(rotate_method=config.rotate_method, convert_to_fp32=config.convert_to_fp32),
    )


def mesh_for(mesh: ContextMesh | DeviceMesh | None, parallelism: Parallelism, device: torch.device) -> ContextMesh:
    """Returns `mesh`, one built here if it is None, or one adopted if it is PyTorch's. Raises ValueError where degrees
    and mesh disagree."""
    if mesh is None:
        return build_mesh(parallelism, device)
    if isinstance(mesh, DeviceMesh):
        return adopt_mesh(mesh, parallelism, device).with_shares(parallelism.shares)
    for name in ("ring", "ulysses"):
        size, degree = getattr(mesh, name).size, getattr(parallelism, f"{name}_degree")
        if size != degree:
            raise ValueError(f"{name}_degree is {degree}, but the mesh has {size} ranks along {name!r}")
    return mesh.with_shares(parallelism.shares)


def adopt_mesh(mesh: DeviceMesh, parallelism: Parallelism, device: torch.device | None = None) -> ContextMesh:
    """Returns a ContextMesh of the ranks of the caller's DeviceMesh, which may have other dims (fsdp, data).

    It must have "ring" and "ulysses", ring first, with the sizes that `parallelism` says, and "data" and "cfg" where
    those are parallel too; ValueError otherwise. Collective over the mesh, as `build_mesh`.
    """
    _check_dims(mesh, parallelism)
    comm_device = comm_device_of(device or torch.device(mesh.device_type))
    group_state = GroupState()
    names = ("ring", "ulysses", *(name for name in BATCH_DIMS if getattr(parallelism, f"{name}_degree") > 1))
    mesh_dims = {name: mesh_dim_of(mesh[name].get_group(), comm_device, group_state) for name in names}
    both = mesh["ring", "ulysses"]
    flat = both._flatten()
    context = mesh_dim_of(flat.get_group(), comm_device, group_state)
    expected = mesh_dims["ring"].index * mesh_dims["ulysses"].size + mesh_dims["ulysses"].index
    if context.index != expected or tuple(both.mesh[mesh_dims["ring"].index].tolist()) != mesh_dims["ulysses"].ranks:
        raise ValueError(f"the mesh must hold its ranks in ascending order along ring and ulysses, got {both}")
    return ContextMesh(**mesh_dims, context=context, device_mesh=flat)


def _size(mesh: DeviceMesh, name: str) -> int:
    names = mesh.mesh_dim_names or ()
    return mesh.size(names.index(name)) if name in names else 1


def _check_dims(mesh: DeviceMesh, parallelism: Parallelism) -> None:
    names = mesh.mesh_dim_names or ()
    if not {"ring", "ulysses"} <= set(names) or names.index("ring") > names.index("ulysses"):
        raise ValueError(f'the mesh needs a "ring" dim and a "ulysses" dim after it (size 1 if unused), got {names}')
    for name in MESH_DIMS:
        degree = getattr(parallelism, f"{name}_degree")
        size = _size(mesh, name)
        if size != degree and not (name in BATCH_DIMS and degree == 1):
            raise ValueError(f"{name}_degree is {degree}, but the mesh has {size} ranks along {name!r}: {mesh}")
