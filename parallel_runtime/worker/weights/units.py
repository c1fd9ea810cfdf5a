"""Which modules of a network are fetched just before they run: its blocks, and large layers outside of them."""

from __future__ import annotations

from torch import nn

LARGE = 0.02  # of the model's weights: less is whole on every device


def fetched_of(blocks: list[nn.Module], resident: int) -> list[nn.Module]:
    """Without `resident` ones, which are spread evenly."""
    total = len(blocks)
    return [
        block for number, block in enumerate(blocks) if (number + 1) * resident // total == number * resident // total
    ]


def large_layers(network: nn.Module, blocks: list[nn.Module]) -> list[nn.Module]:
    """Layers outside of `blocks` whose weights count."""
    inside = {id(module) for block in blocks for module in block.modules()}
    least = LARGE * weight_bytes(network)
    layers = [module for module in network.modules() if not list(module.children()) and id(module) not in inside]
    return [layer for layer in layers if weight_bytes(layer) > least]


def weight_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())
