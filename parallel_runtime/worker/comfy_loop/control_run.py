"""ControlNets in a run on this rank: made of their descriptions, and computed for this rank's rows of a batch alone.

nodes/describe/control_nets.py describes them; ComfyUI's own loop calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import comfy.model_management
from comfy.controlnet import ControlBase
from torch import nn

from ..batch_groups import BatchGroups, select_entries


def make(loaded: ControlBase, described: dict[str, Any], rebuild: Callable[[Any], Any], vae: Any) -> ControlBase:
    """A ControlNet of the `loaded` file for one run, so that nothing is left of another one's hint. `vae` stands for
    the VAE of a hint that is encoded already."""
    made = loaded.copy()
    for name, value in described["settings"].items():
        setattr(made, name, rebuild(value))
    if described["hint"] is not None:
        made.cond_hint_original = made.cond_hint = described["hint"].to(comfy.model_management.get_torch_device())
        made.vae = vae
    else:
        made.cond_hint_original = described["image"].movedim(-1, 1)
        made.extra_concat_orig = described["masks"]
    made.previous_controlnet = rebuild(described["previous"])
    return made


def of_conds(conds: dict[str, list[dict[str, Any]]]) -> list[ControlBase]:
    """All ControlNets of these conditions, each once, with those that they are chained to."""
    controls: dict[ControlBase, None] = {}
    for control in (cond.get("control") for of_one in conds.values() for cond in of_one):
        while control is not None:
            controls[control] = None
            control = control.previous_controlnet
    return list(controls)


@contextmanager
def own_entries(controls: Iterable[ControlBase], groups: BatchGroups) -> Iterator[None]:
    """Within it the networks of ControlNets, which a run has prepared, compute the entries of this batch group alone.
    The network's own call, not `get_control`, is given fewer entries: that would cut the batch of hints."""
    with ExitStack() as hooks:
        for network in dict.fromkeys(filter(None, map(network_of, controls))) if groups.count > 1 else ():
            hooks.enter_context(network.register_forward_pre_hook(partial(_own_entries, groups), with_kwargs=True))
        yield


def network_of(control: ControlBase) -> nn.Module | None:
    """Its network; of a Control-LoRA None but in a run that has begun."""
    network: nn.Module | None = getattr(control, "t2i_model", None) or getattr(control, "control_model", None)
    return network


def _own_entries(groups: BatchGroups, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    batch = len(kwargs["x"] if "x" in kwargs else args[0])
    entries = groups.local_entries(batch)
    return select_entries(args, entries, batch), select_entries(kwargs, entries, batch)
