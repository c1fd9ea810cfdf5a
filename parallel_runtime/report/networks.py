"""ComfyUI's own FLUX and Wan with random weights, divided over the ranks, against undivided on this one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

import torch
from torch import nn

from ..blocks import blocks_of
from ..networks import Network, network_of
from ..specs import Parallelism, Storage, WeightsMode
from ..worker.engine.divide import divide, undivide
from ..worker.engine.mesh import ContextMesh, build_mesh
from ..worker.weights.places import place
from ..worker.weights.store import Buffers, Store
from .attention import ways
from .cases import Case, Row, Setting, mean_error, unbroken
from .clock import Clock
from .subjects import Subject, subjects

WEIGHTS = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}


def cases(setting: Setting, device: torch.device) -> Iterator[Case]:
    for subject in subjects(tiny=setting.tiny, one_card=setting.one_card):
        for held, weights in WEIGHTS.items():
            told = {"what": subject.name, "weights": held}
            yield from unbroken(told, _of_subject(subject, weights, told, setting, device))


def plan_of(network: nn.Module) -> Network:
    found = network_of(network)
    assert found is not None, f"no plan for {type(network)}"
    return found


def _of_subject(
    subject: Subject, weights: torch.dtype, told: Row, setting: Setting, device: torch.device
) -> Iterator[Case]:
    network = subject.build(weights, device)
    inputs = subject.inputs(device)
    clock = Clock(lambda: network(**inputs, transformer_options={}), device)
    plain = clock.run()

    def error() -> Row:
        return {"error": mean_error(clock.run(), plain)}

    def case(words: str) -> Case:
        return Case(told | {"degrees": words}, error, None if setting.one_card else clock.eager)

    def cut(words: str, parallelism: Parallelism, mesh: ContextMesh, mode: WeightsMode) -> Iterator[Case]:
        with divided(network, mesh, parallelism), _at_rest(network, Storage(mode=mode), mesh, device):
            yield case(words if mode == "replicate" else f"{words}, {mode}")

    yield case("ComfyUI's own")
    for number, (words, parallelism) in enumerate([*ways(setting.world)] or [("1 rank", Parallelism())]):
        mesh = build_mesh(parallelism, device)
        for mode in get_args(WeightsMode) if number == 0 else ("replicate",):
            if mode != "shard" or setting.world > 1:
                yield from unbroken(told | {"degrees": f"{words}, {mode}"}, cut(words, parallelism, mesh, mode))


@contextmanager
def divided(network: nn.Module, mesh: ContextMesh, parallelism: Parallelism) -> Iterator[None]:
    divide(network, plan_of(network).plan, mesh, parallelism)
    try:
        yield
    finally:
        undivide(network)


@contextmanager
def _at_rest(network: nn.Module, storage: Storage, mesh: ContextMesh, device: torch.device) -> Iterator[None]:
    """All of its blocks where `storage` says, beside the weights themselves."""
    where = place(storage, mesh.context, device, Buffers(device))
    if where is None:
        yield
        return
    blocks = blocks_of(network, plan_of(network).plan)
    whole = {module: dict(module._parameters) for block in blocks for module in block.modules()}
    store = Store(network, where.source(), where.buffers)
    try:
        for block in blocks:
            store.put(block)
        store.seal()
        yield
    finally:
        store.close()
        for module, parameters in whole.items():
            module._parameters.update(parameters)
