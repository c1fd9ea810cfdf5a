"""Attention that modules of a network bring along: in newer versions of ComfyUI a checkpoint may choose it for each.

ComfyUI calls it only where nobody overrides attention, and tells an override nothing of it.
"""

from __future__ import annotations

from torch import nn

KIND = "ComfyAttention"


def own_attentions(network: nn.Module) -> dict[str, str]:
    """What the modules choose, a function's name, to the first of those that do."""
    found: dict[str, str] = {}
    for path, module in network.named_modules():
        function = getattr(module, "function", None) if type(module).__name__ == KIND else None
        if function is not None:
            found.setdefault(getattr(function, "__name__", type(function).__name__), path)
    return found
