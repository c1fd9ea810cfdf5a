"""ComfyUI's networks on fake "cuda" tensors, in a group of ranks that are not there.

    COMFYUI_PATH=... python -m tests.architectures.fake_cuda CASE ...

Prints one JSON object: for each case {"RING x ULYSSES, rank N": what was found}, which is {"error": ...}, or who made
the host wait: {"inside": of blocks, "outside": of them}, by line of code, and "alone" for the undivided network.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from parallel_runtime.architectures.network_modules import blocks_of
from parallel_runtime.engine.comm.mesh import build_mesh
from parallel_runtime.engine.parallelize import parallelize, unparallelize
from parallel_runtime.specs import Parallelism

from ..fake_cuda import Launches, fake_cuda, fake_group, on_fake_cuda
from ..zoo import tiny
from . import fake_cuda_step
from .cases import made, plan_of

DEGREES = [(2, 1), (1, 2), (4, 1), (1, 4), (2, 2)]
STEP = "a sampling step"
Evaluation = Callable[[], Any]


def main(names: list[str]) -> None:
    tiny.computed_in(torch.bfloat16)
    print(json.dumps({name: dict(_runs(*_subject(name))) for name in names}))


def _subject(name: str) -> tuple[nn.Module, Evaluation]:
    """A network, and what runs it."""
    if name == STEP:
        model = fake_cuda_step.model()
        with fake_cuda():
            on_fake_cuda(model, dtype=None)
        return model.diffusion_model, lambda: fake_cuda_step.step(model)
    network, inputs = made(name)
    with fake_cuda():
        on_fake_cuda(network, dtype=None)
        given = _moved(inputs)
    return network, lambda: network(**given, transformer_options={})


def _runs(network: nn.Module, run: Evaluation) -> Iterator[tuple[str, Any]]:
    yield "alone", _waits(network, run)
    for ring, ulysses in DEGREES:
        degrees = Parallelism(ring_degree=ring, ulysses_degree=ulysses)
        for rank in (0, ring * ulysses - 1):
            with fake_group(ring * ulysses, rank):
                parallelize(network, plan_of(network).plan, build_mesh(degrees, torch.device("cuda", 0)), degrees)
                yield f"{ring} x {ulysses}, rank {rank}", _waits(network, run)
                unparallelize(network)


def _waits(network: nn.Module, run: Evaluation) -> dict[str, Any]:
    inside, outside = Launches(lambda: True), Launches(lambda: True)
    try:
        with fake_cuda(), outside, _within(blocks_of(network, plan_of(network).plan, carrying=True), inside):
            out = run()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:600]}
    assert all(tensor.device.type == "cuda" for tensor in ([out] if isinstance(out, Tensor) else out))
    return {"inside": sorted(inside.waits), "outside": sorted(outside.waits)}


@contextmanager
def _within(blocks: list[nn.Module], launches: Launches) -> Iterator[None]:
    """`launches` counts inside of these."""

    def enter(*_: Any) -> None:
        launches.__enter__()

    def leave(*_: Any) -> None:
        launches.__exit__(None, None, None)

    handles = [block.register_forward_pre_hook(enter, prepend=True) for block in blocks]
    handles += [block.register_forward_hook(leave, always_call=True) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _moved(value: Any) -> Any:
    if isinstance(value, Tensor):
        dtype = torch.bfloat16 if value.is_floating_point() else value.dtype
        return torch.empty(value.shape, dtype=dtype, device="cuda")
    if isinstance(value, dict):
        return {name: _moved(item) for name, item in value.items()}
    return type(value)(map(_moved, value)) if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    main(sys.argv[1:])
