"""A model, for a while, on this rank's rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import nn

from .mode import Rows

ATTENTION = ("optimized_attention", "optimized_vae_attention")  # what ComfyUI's VAE blocks call, attributes of theirs


@contextmanager
def divided(model: nn.Module, rows: Rows, over_time: Collection[str] = ()) -> Iterator[None]:
    """Within it `model` runs on this rank's rows. Modules of the classes `over_time` ("module.Class") attend along
    time only, each pixel for itself, and are left as they are."""
    found = [(module, name) for module in model.modules() for name in ATTENTION if name in vars(module)]
    before = [getattr(module, name) for module, name in found]
    local = [module for module in model.modules() if f"{type(module).__module__}.{type(module).__name__}" in over_time]
    hooks = [module.register_forward_pre_hook(lambda *_: rows.enter_local()) for module in local]
    hooks += [module.register_forward_hook(lambda *_: rows.leave_local(), always_call=True) for module in local]
    try:
        for module, name in found:
            setattr(module, name, rows.attention)
        with rows:
            yield
    finally:
        for (module, name), kept in zip(found, before, strict=True):
            setattr(module, name, kept)
        for hook in hooks:
            hook.remove()
