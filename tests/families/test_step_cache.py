"""First-block caching of every family in one process: what is skipped, what comes out, and that nothing stays."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from diffusers.hooks import FirstBlockCacheConfig
from torch import Tensor

from parallel_runtime.specs import Parallelism
from parallel_runtime.worker.engine.attach import attach
from parallel_runtime.worker.engine.diffusers_plans import plan_of
from parallel_runtime.worker.engine.mesh import ContextMesh
from parallel_runtime.worker.loading import Loaded, load
from parallel_runtime.worker.step_cache import StepCache

from ..first_block import change_between
from ..tiny import TINY, hints, write
from .parallel_ranks import call_of

EXACT = 1e-5
HAVE_DIFFUSERS_OWN = ("flux_dev", "flux_schnell", "qwen_image", "wan_t2v", "wan_i2v", "wan_5b", "ltxv", "hunyuan_video")

Call = tuple[Tensor, Tensor, dict[str, Any]]


@pytest.fixture(scope="module", params=TINY)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def loaded(name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    path = write(tmp_path_factory.mktemp("tiny"), name)
    loaded = load(path, weight_dtype=torch.float32, compute_dtype=torch.float32, hints=hints(name))
    attach(loaded.transformer, ContextMesh(), Parallelism())
    with torch.inference_mode():
        yield loaded


@pytest.fixture
def call(loaded: Loaded, name: str) -> Call:
    return call_of(loaded, name, "batch" if name in ("flux_dev", "wan_t2v") else "odd")


def cache_of(loaded: Loaded, threshold: float) -> StepCache:
    return StepCache(loaded.transformer, plan_of(loaded.transformer), ContextMesh(), threshold)


def run(loaded: Loaded, cache: StepCache, calls: list[Call], branch: str = "one") -> list[Tensor]:
    outputs = []
    for made in calls:
        with cache.branch(branch):
            outputs.append(loaded.family.call(loaded.transformer, *made))
    return outputs


def path_of(call: Call) -> list[Call]:
    """A way through the latents with small steps and two large ones."""
    x, timestep, cond = call
    other = torch.randn(x.shape, generator=torch.Generator().manual_seed(5))
    return [(x + share * (other - x), timestep, cond) for share in (0, 0.01, 0.02, 0.6, 0.61, 1.0, 1.01)]


def apart(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.std())


def test_an_evaluation_that_repeats_gives_the_same_and_runs_one_block(loaded: Loaded, call: Call) -> None:
    want = loaded.family.call(loaded.transformer, *call)
    cache, ran = cache_of(loaded, 1e-3), set()
    stacks = tuple(f"{site.name}." for site in plan_of(loaded.transformer).trunk)
    with cache.caching():
        run(loaded, cache, [call])
        handles = [
            module.register_forward_hook(lambda *_, name=name: ran.add(name))
            for name, module in loaded.transformer.named_modules()
            if name.startswith(stacks) and name.count(".") > 1
        ]
        (got,) = run(loaded, cache, [call])
    for handle in handles:
        handle.remove()
    assert [cache.skipped, cache.evaluations] == [1, 2]
    assert apart(got, want) <= EXACT
    assert ran
    assert all(name.startswith(f"{stacks[0]}0.") for name in ran)


@pytest.mark.parametrize("name", HAVE_DIFFUSERS_OWN, indirect=True)
def test_it_is_diffusers_own_first_block_cache_where_there_is_one(loaded: Loaded, call: Call) -> None:
    """For one picture, and on one process: diffusers decides by all pictures' mean, and by a rank's own tokens."""
    one = (call[0][:1], call[1][:1], {k: v[:1] if torch.is_tensor(v) else v for k, v in call[2].items()})
    cache = cache_of(loaded, 0.2)
    with cache.caching():
        ours = run(loaded, cache, path_of(one))
    theirs = []
    loaded.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.2))
    for made in path_of(one):
        with loaded.transformer.cache_context("one"):
            theirs.append(loaded.family.call(loaded.transformer, *made))
    loaded.transformer.disable_cache()
    for module in loaded.transformer.modules():
        vars(module).pop("forward", None)  # which disable_cache leaves behind
    assert 0 < cache.skipped < cache.evaluations - 1
    assert max(apart(got, want) for got, want in zip(ours, theirs, strict=True)) <= EXACT


def test_branches_do_not_mix(loaded: Loaded, call: Call) -> None:
    """Two prompts in turn each skip by their own last evaluation, though every other one is far away."""
    x, timestep, cond = call
    far = (torch.randn(x.shape, generator=torch.Generator().manual_seed(6)), timestep, cond)
    want = [loaded.family.call(loaded.transformer, *made) for made in (call, far)]
    cache = cache_of(loaded, 1e-3)
    with cache.caching():
        for made, branch in ((call, "positive"), (far, "negative")):
            run(loaded, cache, [made], branch)
        got = [run(loaded, cache, [made], branch)[0] for made, branch in ((call, "positive"), (far, "negative"))]
    assert [cache.skipped, cache.evaluations] == [2, 4]
    assert max(map(apart, got, want)) <= EXACT


@pytest.mark.parametrize("name", ["flux_dev"], indirect=True)
def test_one_picture_that_changes_has_all_of_its_batch_evaluated(loaded: Loaded, call: Call) -> None:
    """It alone changes by more than the threshold, the mean of both by less."""
    x, timestep, cond = call
    moved = x.clone()
    moved[1] += 0.3 * torch.randn(x[1].shape, generator=torch.Generator().manual_seed(7))
    second = (moved, timestep, cond)
    evaluations = [partial(loaded.family.call, loaded.transformer, *made) for made in (call, second)]
    still, change = change_between(loaded.transformer, plan_of(loaded.transformer), *evaluations).tolist()
    assert still == 0
    for threshold, skipped in ((0.9 * change, 0), (1.1 * change, 1)):
        cache = cache_of(loaded, threshold)
        with cache.caching():
            run(loaded, cache, [call, second])
        assert cache.skipped == skipped


@pytest.mark.parametrize("name", ["flux_dev"], indirect=True)
def test_what_is_no_number_is_never_skipped(loaded: Loaded, call: Call) -> None:
    x, timestep, cond = call
    cache = cache_of(loaded, 1.0)
    with cache.caching():
        run(loaded, cache, [(x * float("nan"), timestep, cond)] * 3)
    assert [cache.skipped, cache.evaluations] == [0, 3]


@pytest.mark.parametrize("name", ["flux_dev", "wan_t2v"], indirect=True)
def test_a_run_leaves_nothing_for_the_next_also_when_it_fails(loaded: Loaded, call: Call) -> None:
    plain = loaded.family.call(loaded.transformer, *call)
    cache = cache_of(loaded, 0.2)
    with cache.caching():
        first = run(loaded, cache, path_of(call))
    assert not cache._branches
    with pytest.raises(AttributeError), cache.caching():
        run(loaded, cache, [call, (None, None, {})])  # type: ignore[list-item]
    with cache.caching():
        again = run(loaded, cache, path_of(call))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(loaded.family.call(loaded.transformer, *call), plain)
    assert not [module for module in loaded.transformer.modules() if "forward" in vars(module)]
