"""A model, for a while, on this rank's rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import nn

from .mode import Rows

ATTENTION = "optimized_attention"  # what ComfyUI's VAE blocks call, each an attribute of its own


@contextmanager
def divided(model: nn.Module, rows: Rows, over_time: Collection[str] = ()) -> Iterator[None]:
    """Within it `model` runs on this rank's rows. Modules of the classes `over_time` ("module.Class") attend along
    time only, each pixel for itself, and are left as they are."""
    found = [module for module in model.modules() if ATTENTION in vars(module)]
    before = [getattr(module, ATTENTION) for module in found]
    local = [module for module in model.modules() if f"{type(module).__module__}.{type(module).__name__}" in over_time]
    hooks = [module.register_forward_pre_hook(lambda *_: rows.enter_local()) for module in local]
    hooks += [module.register_forward_hook(lambda *_: rows.leave_local(), always_call=True) for module in local]
    try:
        for module in found:
            setattr(module, ATTENTION, rows.attention)
        with rows:
            yield
    finally:
        for module, kept in zip(found, before, strict=True):
            setattr(module, ATTENTION, kept)
        for hook in hooks:
            hook.remove()
