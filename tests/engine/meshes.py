"""Meshes of the rank this runs on: one per shape and process, as in a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from parallel_runtime.engine.comm.mesh import ContextMesh, build_mesh
from parallel_runtime.specs import Parallelism


def parallelism(ring: int, ulysses: int, cfg: int = 1, shares: Sequence[int] = (), **options: Any) -> Parallelism:
    degrees = Parallelism(ring_degree=ring, ulysses_degree=ulysses, cfg_degree=cfg, shares=tuple(shares))
    return degrees.with_options(**options)


def mesh(ring: int, ulysses: int, cfg: int = 1, shares: Sequence[int] = ()) -> ContextMesh:
    return _mesh(ring, ulysses, cfg).with_shares(tuple(shares))


@cache
def _mesh(ring: int, ulysses: int, cfg: int) -> ContextMesh:
    return build_mesh(parallelism(ring, ulysses, cfg))


@cache
def staged_mesh(ring: int, ulysses: int) -> ContextMesh:
    """A mesh whose collectives take their tensors through another device, as gloo's do for ranks on a GPU."""
    mesh_dims = {name: getattr(mesh(ring, ulysses), name) for name in ("ring", "ulysses", "context")}
    return ContextMesh(
        **{name: replace(mesh_dim, comm_device=torch.device("cpu")) for name, mesh_dim in mesh_dims.items()}
    )
