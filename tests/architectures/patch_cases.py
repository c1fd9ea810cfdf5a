"""What each rank does in the tests of patches, in ComfyUI's python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from parallel_runtime.architectures.network_modules import counts_of, why_not_in_patches
from parallel_runtime.engine.attention import ring_and_ulysses
from parallel_runtime.engine.split.streams import PipeFusion
from parallel_runtime.engine.stages import Stages
from parallel_runtime.errors import Refused
from parallel_runtime.request import EngineOptions
from parallel_runtime.specs import Parallelism

from ..zoo.calls import Inputs
from .cases import digest, error, forward, made, plan_of
from .stage_cases import deepen, mesh_of
from .stale_keys import reference


@contextmanager
def in_patches(network: nn.Module, stages: int, patches: int, ulysses: int = 1) -> Iterator[tuple[Stages, PipeFusion]]:
    known = plan_of(network)
    degrees = Parallelism(pipeline_degree=stages, ulysses_degree=ulysses, options=EngineOptions(token_patches=patches))
    cut = Stages(network, known.plan, mesh_of(degrees), degrees)
    assert cut.pipefusion is not None
    try:
        yield cut, cut.pipefusion
    finally:
        cut.close()


def cached_bytes(pipefusion: PipeFusion) -> int:
    pairs = (pair for branch in pipefusion._branches.values() for pair in branch.cached_kv.values())
    return sum(key.nbytes + value.nbytes for key, value in pairs)


def same_input(rank: int, world: int, name: str, stages: int, patches: int, ulysses: int = 1) -> dict[str, Any]:
    """How far evaluations of one input are from the plain network: nothing is stale, if its keys are one step old."""
    network, inputs = made(name)
    deepen(network, stages)
    plain = forward(network, inputs)
    with in_patches(network, stages, patches, ulysses) as (cut, pipefusion):
        first = forward(network, inputs)
        kept = cached_bytes(pipefusion)
        alone = forward(network, inputs)
        together: list[Tensor] = []
        for _ in range(2):
            with cut.in_flight():
                together = cut.share_outputs([x for _ in range(2) for x in forward(network, inputs)])
        grown = cached_bytes(pipefusion) / max(1, kept)
    again = forward(network, inputs)
    return {
        "first": error(first, plain),
        "alone": error(alone, plain),
        "in flight": error(together, plain * 2),
        "left": error(again, plain),
        "bits": digest(alone),
        "kept": grown,
    }


def stale(
    rank: int, world: int, name: str, stages: int, patches: int, ulysses: int = 1, exact: int = 1
) -> dict[str, Any]:
    """Four steps of two prompts that differ, all in flight, the first `exact` of them whole: how far each is from what
    one process computes by the definition, and that from the network as it is."""
    network, inputs = made(name)
    deepen(network, stages)
    steps = [[moved(inputs, seed=10 * step + prompt, by=0.1 * step) for prompt in range(2)] for step in range(4)]
    plain = [[x for given in step for x in forward(network, given)] for step in steps]
    wanted = reference(network, name, steps, patches, exact)
    got = []
    with in_patches(network, stages, patches, ulysses) as (cut, pipefusion):
        for number, step in enumerate(steps):
            pipefusion.exact = number < exact
            got.append(in_a_step(network, cut, step))
    return {
        "error": [error(one, other) for one, other in zip(got, wanted, strict=True)],
        "stale": [error(one, other) for one, other in zip(wanted, plain, strict=True)],
        "bits": digest([x for step in got for x in step]),
    }


def moved(inputs: Inputs, seed: int, by: float) -> Inputs:
    """Another prompt's inputs, a step on."""
    generator = torch.Generator().manual_seed(seed)
    x = inputs["x"]
    return inputs | {"x": x + by * torch.randn(x.shape, generator=generator, dtype=x.dtype)}


def in_a_step(network: nn.Module, cut: Stages, step: list[Inputs], **options: Any) -> list[Tensor]:
    with cut.in_flight():
        return cut.share_outputs([x for given in step for x in forward(network, given, **options)])


def two_waves(rank: int, world: int) -> dict[str, Any]:
    """`stale` where heads of all tokens would travel in two exchanges, and those of a patch in one."""
    before, ring_and_ulysses.MIN_HIDDEN_BYTES = ring_and_ulysses.MIN_HIDDEN_BYTES, 150_000
    try:
        return stale(rank, world, "wan", stages=2, patches=3, ulysses=2)
    finally:
        ring_and_ulysses.MIN_HIDDEN_BYTES = before


def comes_and_goes(rank: int, world: int) -> dict[str, Any]:
    """Steps of prompts, by their numbers: how far each is from the network as it is, and what is kept of them, as a
    multiple of what planning counts for one; then how that is after `forget`."""
    network, inputs = made("flux")
    known, prompts = plan_of(network), [moved(inputs, seed=number, by=1.0) for number in range(2)]
    numbers = ((0,), (0, 1), (0,), (0, 1), (0, 1), (1,))
    steps = [[(n, moved(prompts[n], seed=at, by=0.5)) for n in step] for at, step in enumerate(numbers)]
    plain = [[forward(network, given) for _, given in step] for step in steps]
    tokens, layers = sum(known.tokens(network, inputs["x"].shape, 7).values()), known.layers(network)
    errors, kept = [], []
    with in_patches(network, 2, 4) as (cut, pipefusion):
        for step, wanted in zip(steps, plain, strict=True):
            with cut.in_flight():
                got = cut.share_outputs([x for number, given in step for x in forward(network, given, uuids=[number])])
            errors.append([error([a], b) for a, b in zip(got, wanted, strict=True)])
            kept.append(cached_bytes(pipefusion))
        pipefusion.reset()
        kept.append(cached_bytes(pipefusion))
    own = counts_of(network, known.plan, Parallelism(pipeline_degree=2, options=EngineOptions(token_patches=4)))[rank]
    each = 2 * len(inputs["x"]) * tokens * known.width(network) * own * 4
    assert sum(counts_of(network, known.plan, Parallelism(pipeline_degree=2))) == layers
    return {"errors": errors, "kept": [size / each for size in kept]}


def a_run(rank: int, world: int) -> dict[str, Any]:
    """Whether evaluations at falling and at rising noise levels are exact in runs with two exact steps, and whether
    anything is kept: as a run begins and at its end, and after it; the last one fails."""
    from comfy.model_patcher import ModelPatcher
    from comfy.patcher_extension import WrappersMP

    from parallel_runtime.worker.comfy_loop.sampling import with_pipefusion as of_a_run

    network, inputs = made("flux")
    falling, exact, kept = torch.linspace(1.0, 0.0, 11), [], []
    with in_patches(network, 2, 4) as (cut, pipefusion):

        def evaluated(inner: Any, conds: list[Any], x: Tensor, sigma: Tensor) -> list[Tensor]:
            exact.append(pipefusion.exact)
            return in_a_step(network, cut, [inputs])

        def run(sigmas: Tensor, levels: list[float], fails: bool = False) -> None:
            patcher = ModelPatcher(network, torch.device("cpu"), torch.device("cpu"))
            with of_a_run(pipefusion, patcher, sigmas, warmup_steps=2):
                kept.append(cached_bytes(pipefusion) > 0)
                (watch,) = patcher.get_all_wrappers(WrappersMP.CALC_COND_BATCH)
                for level in levels:
                    watch(evaluated, None, [], inputs["x"], torch.tensor([level]))
                kept.append(cached_bytes(pipefusion) > 0)
                assert not fails

        in_a_step(network, cut, [inputs])
        for sigmas, levels in ((falling, [1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.9]), (falling.flip(0), [0.0, 0.1, 0.2])):
            run(sigmas, levels)
            kept.append(cached_bytes(pipefusion) > 0)
        with suppress(AssertionError):
            run(falling, [1.0], fails=True)
        kept.append(cached_bytes(pipefusion) > 0)
    return {"exact": exact, "kept": kept}


def refusal(rank: int, world: int, name: str, patches: int, between: str = "") -> str:
    """Why a network is not evaluated in patches."""
    network, inputs = made(name)
    if why := why_not_in_patches(plan_of(network).plan):
        return why
    deepen(network, world)
    options: dict[str, Any] = {}
    if between == "dit":
        options = {"patches_replace": {"dit": {("double_block", 0): lambda given, more: more["original_block"](given)}}}
    elif between:
        options = {"patches": {between: [lambda given: given]}}
    try:
        with in_patches(network, world, patches):
            forward(network, inputs, **options)
    except Refused as refused:
        return str(refused)
    return ""
