"""What each rank does in the tests of Stable Cascade, in ComfyUI's python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parallel_runtime.architectures import architecture_of
from parallel_runtime.architectures.row_plan import RowPlan
from parallel_runtime.engine.parallelize import parallelize, unparallelize

from ..engine.meshes import mesh, parallelism
from ..zoo import tiny

tiny.start_comfyui()
from ..zoo import row_calls  # noqa: E402


def apart(
    rank: int,
    world: int,
    name: str,
    ring: int,
    ulysses: int,
    sizes: Sequence[Sequence[int]],
    shares: Sequence[int] = (),
    more: dict[str, bool] | None = None,
    **options: Any,
) -> list[dict[str, float]]:
    """Of each size (rows, columns, batch): how far the divided run is from the undivided one, and that from a later
    undivided one, as shares of the standard deviation."""
    network = row_calls.made(name)
    known = architecture_of(network)
    assert known is not None
    assert isinstance(known.plan, RowPlan)
    errors = []
    with torch.inference_mode():
        for size in sizes:

            def run(size: Sequence[int] = size) -> Tensor:
                out: Tensor = network(**row_calls.cascade(name, *size, **(more or {})), transformer_options={})
                return out

            plain = run()
            degrees = parallelism(ring, ulysses, 1, shares, **options)
            parallelize(network, known.plan, mesh(ring, ulysses, 1, shares), degrees)
            try:
                divided = run()
            finally:
                unparallelize(network)
            apart = {"apart": divided, "left": run()}
            errors.append({key: float((out - plain).abs().max() / plain.std()) for key, out in apart.items()})
    return errors
