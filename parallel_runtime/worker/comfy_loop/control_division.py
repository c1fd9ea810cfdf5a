"""Makes ControlNets context parallel for one run, like the network that their residuals are added to.

In a run with a UNet all residuals are this rank's rows: full ones are split before they are added to others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from comfy.controlnet import ControlBase, T2IAdapter
from torch import Size, Tensor, nn

from ...architectures.control_networks import ControlRowPlan, control_plan_of
from ...engine.rows.row_division import RowDivision, split_residuals
from ...engine.split.parallelize import parallelize_control, unparallelize
from ...engine.split.streams import PARALLELIZED
from ..models import Model
from .control_run import network_of

OfNetwork = tuple[nn.Module, Sequence[ControlBase]]  # and the ControlNets of a run that it is the network of

log = logging.getLogger(__name__)


@contextmanager
def divided(controls: Iterable[ControlBase], model: Model) -> Iterator[None]:
    """Within it the networks of these ControlNets, which a run has prepared, run over the context ranks of the `model`.
    It undoes that in the end: in the next run these ranks may have different prompts, which would be mixed silently."""
    with ExitStack() as undo:
        if model.splits_tokens:
            _divide(undo, list(_by_network(controls)), model)
        yield


def _by_network(controls: Iterable[ControlBase]) -> Iterable[OfNetwork]:
    users: dict[nn.Module, list[ControlBase]] = {}
    for control in controls:
        if (network := network_of(control)) is not None:
            users.setdefault(network, []).append(control)
    return users.items()


def _divide(undo: ExitStack, networks: Sequence[OfNetwork], model: Model) -> None:
    division, undivided = getattr(model.network, PARALLELIZED), list[OfNetwork]()
    for network, users in networks:
        if reason := _undivided_reason(network, users, model):
            _log_undivided(model, users[0], reason)
            undivided.append((network, users))
    if isinstance(division, RowDivision):
        for control in (control for _, users in undivided for control in users):
            undo.enter_context(_split_by_rows(control, division))
    elif undivided:  # its full residuals would be added to parts of others
        return
    for network, users in networks:
        if (network, users) not in undivided:
            _divide_network(network, model)
            undo.callback(unparallelize, network)


def _divide_network(network: nn.Module, model: Model) -> None:
    plan, parallelism = control_plan_of(network), model.parallelism
    assert plan is not None
    assert parallelism is not None
    parallelize_control(network, plan, model.network, model.mesh, parallelism)


def _undivided_reason(network: nn.Module, users: Sequence[ControlBase], model: Model) -> str:
    """Returns why every rank computes a ControlNet in full; "" where it can be divided."""
    plan, division = control_plan_of(network), getattr(model.network, PARALLELIZED)
    if plan is None or isinstance(plan, ControlRowPlan) != isinstance(division, RowDivision):
        return f"nothing is known of how to divide a {type(network).__name__}"
    if any(control.global_average_pooling for control in users):
        return "it takes means over the whole picture"
    if isinstance(plan, ControlRowPlan) and isinstance(division, RowDivision):
        depth = plan.depth(network) - plan.hint_halvings
        if depth != division.depth:
            return f"it halves the latent {depth} times, and the network {division.depth} times"
    return ""


def _log_undivided(model: Model, control: ControlBase, reason: str) -> None:
    """Logs one line a run, on rank 0; none for a T2I adapter, which is computed once a run."""
    mesh = model.mesh
    first = not any(mesh_dim.index for mesh_dim in (mesh.pipeline, mesh.data, mesh.cfg, mesh.context))
    if first and not isinstance(control, T2IAdapter):
        log.warning("[CP] a ControlNet (%s) runs undivided on each rank: %s", type(control).__name__, reason)


@contextmanager
def _split_by_rows(control: ControlBase, division: RowDivision) -> Iterator[None]:
    """Within it an undivided ControlNet or T2I adapter returns this rank's rows of its residuals."""
    get, merge, latents = control.get_control, control.control_merge, list[Size]()

    def get_control(x_noisy: Tensor, *args: Any, **kwargs: Any) -> Any:
        latents[:] = [x_noisy.shape]
        return get(x_noisy, *args, **kwargs)

    def control_merge(residuals: Any, previous: Any, output_dtype: Any) -> Any:
        full, levels = merge(residuals, None, output_dtype), division.levels_of(latents[0])
        own = full if levels is None else split_residuals(full, levels)
        return ControlBase().control_merge(own, previous, None)

    control.get_control, control.control_merge = get_control, control_merge
    try:
        yield
    finally:
        del control.get_control, control.control_merge
