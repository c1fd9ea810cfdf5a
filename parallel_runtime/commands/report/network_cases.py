"""ComfyUI's own FLUX and Wan with random weights, divided over the ranks, against undivided on this one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

import torch
from torch import nn

from ...architectures import Architecture, architecture_of
from ...architectures.network_modules import blocks_of
from ...engine.comm.mesh import ContextMesh, build_mesh
from ...engine.split.parallelize import parallelize, unparallelize
from ...engine.weights.placement import rank_placement
from ...engine.weights.prefetch import BlockPrefetcher, Buffers
from ...specs import Parallelism, WeightPlacement, WeightsMode
from .attention_cases import parallelisms
from .measuring import Case, Clock, Measurement, Setting, mean_error, unbroken
from .subjects import Subject, subjects

WEIGHTS = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}


def cases(setting: Setting, device: torch.device) -> Iterator[Case]:
    for subject in subjects(tiny=setting.tiny, one_card=setting.one_card):
        for dtype, weights in WEIGHTS.items():
            labels = {"what": subject.name, "weights": dtype}
            yield from unbroken(labels, _of_subject(subject, weights, labels, setting, device))


def plan_of(network: nn.Module) -> Architecture:
    architecture = architecture_of(network)
    assert architecture is not None, f"no plan for {type(network)}"
    return architecture


def _of_subject(
    subject: Subject, weights: torch.dtype, labels: Measurement, setting: Setting, device: torch.device
) -> Iterator[Case]:
    network = subject.build(weights, device)
    inputs = subject.inputs(device)
    clock = Clock(lambda: network(**inputs, transformer_options={}), device)
    plain = clock.run()

    def error() -> Measurement:
        return {"error": mean_error(clock.run(), plain)}

    def case(words: str) -> Case:
        return Case(labels | {"degrees": words}, error, None if setting.one_card else clock.eager)

    def split(words: str, parallelism: Parallelism, mesh: ContextMesh, mode: WeightsMode) -> Iterator[Case]:
        with divided(network, mesh, parallelism), placed_weights(network, WeightPlacement(mode=mode), mesh, device):
            yield case(words if mode == "replicate" else f"{words}, {mode}")

    yield case("ComfyUI's own")
    for number, (words, parallelism) in enumerate([*parallelisms(setting.world_size)] or [("1 rank", Parallelism())]):
        mesh = build_mesh(parallelism, device)
        for mode in get_args(WeightsMode) if number == 0 else ("replicate",):
            if mode != "shard" or setting.world_size > 1:
                yield from unbroken(labels | {"degrees": f"{words}, {mode}"}, split(words, parallelism, mesh, mode))


@contextmanager
def divided(network: nn.Module, mesh: ContextMesh, parallelism: Parallelism) -> Iterator[None]:
    parallelize(network, plan_of(network).plan, mesh, parallelism)
    try:
        yield
    finally:
        unparallelize(network)


@contextmanager
def placed_weights(
    network: nn.Module, placement: WeightPlacement, mesh: ContextMesh, device: torch.device
) -> Iterator[None]:
    """Places the weights of all blocks by `placement` in this context; the original weights stay too."""
    of_rank = rank_placement(placement, mesh.context, device, Buffers(device))
    if of_rank is None:
        yield
        return
    blocks = blocks_of(network, plan_of(network).plan)
    original = {module: dict(module._parameters) for block in blocks for module in block.modules()}
    prefetcher = BlockPrefetcher(network, of_rank.source(), of_rank.buffers)
    try:
        for block in blocks:
            prefetcher.add(block)
        prefetcher.seal()
        yield
    finally:
        prefetcher.close()
        for module, parameters in original.items():
            module._parameters.update(parameters)
