"""Divides the ControlNets of one run on this rank: the entries of a batch over batch groups, and the forward over the
ranks of one sequence, like the network that their residuals are added to. ComfyUI's own loop calls them.

In a run with a UNet all residuals are this rank's rows: full ones are split before they are added to others."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from comfy.controlnet import ControlBase, T2IAdapter
from torch import Size, Tensor, nn

from ...architectures import control_plan_of
from ...architectures.row_plan import ControlRowPlan
from ...architectures.split_plan import SplitPlan
from ...engine.comm.mesh import MeshDim
from ...engine.comm.ranks import rank
from ...engine.parallelize import parallelize_control, unparallelize
from ...engine.rows.row_division import RowDivision, split_residuals
from ...engine.split.streams import PARALLELIZED
from ..batch_groups import local_entries, select_entries
from ..models import Model

log = logging.getLogger(__name__)


@contextmanager
def own_entries(controls: Iterable[ControlBase], dim: MeshDim) -> Iterator[None]:
    """Has the networks of these ControlNets, which a run has prepared, compute only the entries of this batch group in
    this context."""

    # The network's own call, not `get_control`, gets fewer entries: that would cut the batch of hints.
    def select(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        batch = len(kwargs["x"] if "x" in kwargs else args[0])
        entries = local_entries(dim, batch)
        return select_entries(args, entries, batch), select_entries(kwargs, entries, batch)

    with ExitStack() as hooks:
        for network in _by_network(controls) if dim.size > 1 else ():
            hooks.enter_context(network.register_forward_pre_hook(select, with_kwargs=True))
        yield


@contextmanager
def divided(controls: Iterable[ControlBase], model: Model) -> Iterator[None]:
    """Has the networks of these ControlNets, which a run has prepared, run over the context ranks of the `model` in
    this context."""
    # And no longer: in the next run these ranks may have different prompts, which would be mixed silently.
    with ExitStack() as undo:
        if model.parallelism.splits_tokens:
            _divide(undo, _by_network(controls), model)
        yield


def _by_network(controls: Iterable[ControlBase]) -> dict[nn.Module, list[ControlBase]]:
    """Returns the ControlNets of each network; a Control-LoRA has one only in a run that has begun."""
    users: dict[nn.Module, list[ControlBase]] = {}
    for control in controls:
        network = getattr(control, "t2i_model", None) or getattr(control, "control_model", None)
        if network is not None:
            users.setdefault(network, []).append(control)
    return users


def _divide(undo: ExitStack, users: dict[nn.Module, list[ControlBase]], model: Model) -> None:
    division = getattr(model.network, PARALLELIZED)
    plans = {network: _plan_of(network, controls, division) for network, controls in users.items()}
    undivided = [network for network, plan in plans.items() if plan is None]
    if isinstance(division, RowDivision):
        for control in (control for network in undivided for control in users[network]):
            undo.enter_context(_split_by_rows(control, division))
    elif undivided:  # its full residuals would be added to parts of others
        return
    for network, plan in plans.items():  # in the same order on all ranks
        if plan is not None:
            parallelize_control(network, plan, model.network, model.mesh, model.parallelism)
            undo.callback(unparallelize, network)


def _plan_of(network: nn.Module, users: Sequence[ControlBase], division: Any) -> SplitPlan | None:
    """Returns the plan of a ControlNet to divide; None, with a line in the log, where all ranks compute it."""
    plan, reason = control_plan_of(network), ""
    if plan is None or isinstance(plan, ControlRowPlan) != isinstance(division, RowDivision):
        reason = f"nothing is known of how to divide a {type(network).__name__}"
    elif any(control.global_average_pooling for control in users):
        reason = "it takes means over the whole picture"
    elif isinstance(plan, ControlRowPlan) and (depth := plan.depth(network) - plan.hint_halvings) != division.depth:
        reason = f"it halves the latent {depth} times, and the network {division.depth} times"
    if not reason:
        return plan
    if rank() == 0 and not isinstance(users[0], T2IAdapter):  # which is computed once a run
        log.warning("[CP] a ControlNet (%s) runs undivided on each rank: %s", type(users[0]).__name__, reason)
    return None


@contextmanager
def _split_by_rows(control: ControlBase, division: RowDivision) -> Iterator[None]:
    """Has an undivided ControlNet or T2I adapter return this rank's rows of its residuals in this context."""
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
