"""Makes a network of ComfyUI's that has a RowPlan context parallel."""

from __future__ import annotations

from torch import nn

from ...architectures.row_plan import CascadeRowPlan, RowPlan
from ...specs import Parallelism
from ..comm.mesh import ContextMesh
from ..split.streams import PARALLELIZED
from .cascade_rows import CascadeDivision
from .row_division import RowDivision


def parallelize_rows(network: nn.Module, plan: RowPlan, mesh: ContextMesh, parallelism: Parallelism) -> None:
    """Runs every later forward of `network` over the context ranks of `mesh`. Collective, as its forwards are.

    Each rank passes full inputs and gets the full output, equal to what one rank computes. Raises ValueError, and
    changes nothing, when it is parallel already. `unparallelize` of split/parallelize.py undoes it.
    """
    if hasattr(network, PARALLELIZED):
        raise ValueError(f"this {type(network).__name__} is parallel already; unparallelize it first")
    if isinstance(plan, CascadeRowPlan):
        division: RowDivision = CascadeDivision(network, plan, mesh, parallelism)
    else:
        division = RowDivision(network, plan, mesh, parallelism)
    setattr(network, PARALLELIZED, division)
