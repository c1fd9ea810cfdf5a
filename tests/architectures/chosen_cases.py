"""ComfyUI's attention functions as its flags choose them, with stand-ins of the packages that need a GPU."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from parallel_runtime.accelerators import KERNELS
from parallel_runtime.engine.attention import registry

from .cases import divided_forward, error, forward, made


@contextmanager
def started_with(function: str) -> Iterator[None]:
    """Sets in every module what ComfyUI sets at its start with a flag: modules have the function by name."""
    chosen = getattr(importlib.import_module("comfy.ldm.modules.attention"), function)
    names = ("optimized_attention", "optimized_attention_masked")
    places = [
        (vars(module), name)
        for path, module in list(sys.modules.items())
        if path.startswith("comfy.")
        for name in names
        if name in vars(module)
    ]
    before = [values[name] for values, name in places]
    for values, name in places:
        values[name] = chosen
    try:
        yield
    finally:
        for (values, name), value in zip(places, before, strict=True):
            values[name] = value


def chosen(rank: int, world: int, name: str, function: str, ring: int, ulysses: int) -> dict[str, float]:
    """A network under ComfyUI's attention `function`: how far the divided network is from the undivided one, and from
    the same under PyTorch's attention."""
    specs = {key: replace(KERNELS[key], devices=("cpu",)) for key in ("sage", "flash")}
    functions = {key: replace(registry.FUNCTIONS[key], spec=spec) for key, spec in specs.items()}
    network, inputs = made(name)
    with (
        patch.dict(KERNELS, specs),
        patch.dict(registry.FUNCTIONS, functions),
        patch.object(registry.KernelFunction, "unusable_reason", lambda *_: ""),
        started_with("attention_pytorch"),
    ):
        plain: Any = forward(network, inputs)
        with started_with(function):
            wants = forward(network, inputs)
            got = divided_forward(network, inputs, ring, ulysses)
    return {"error": error(got, wants), "of pytorch's": error(got, plain)}
