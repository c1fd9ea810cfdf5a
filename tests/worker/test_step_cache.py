"""First-block caching in one process, on the demo's network: which evaluations are skipped, their results, and cleanup.

Several ranks are in tests/engine, ComfyUI's networks in tests/comfyui.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("diffusers")

from diffusers.hooks import FirstBlockCacheConfig
from torch import Tensor, nn

from parallel_runtime.architectures.split_plan import ModulePlan, Split, SplitPlan
from parallel_runtime.demo import transformer
from parallel_runtime.engine.comm.mesh import ContextMesh
from parallel_runtime.worker.step_cache import StepCache

from ..zoo.checkpoints import write

EXACT = 1e-5
BOTH = {"encoder_hidden_states": Split(("text",)), "hidden_states": Split(("image",))}
PLAN = SplitPlan((ModulePlan("transformer_blocks", {**BOTH}), ModulePlan("single_transformer_blocks", {**BOTH})))


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nn.Module]:
    with torch.inference_mode():
        yield transformer.load(write(tmp_path_factory.mktemp("models"), "flux_schnell"))


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def evaluate(network: nn.Module, x: Tensor) -> Tensor:
    cond = {"c_crossattn": normal(1, 7, 128, seed=1), "y": normal(1, 64, seed=2)}
    return transformer.evaluate(network, x, torch.full((len(x),), 0.7), cond)


def run(network: nn.Module, cache: StepCache, latents: list[Tensor], branch: str = "one") -> list[Tensor]:
    outputs = []
    for x in latents:
        with cache.branch(branch):
            outputs.append(evaluate(network, x))
    return outputs


def cache_of(network: nn.Module, threshold: float) -> StepCache:
    return StepCache(network, PLAN, ContextMesh(), threshold)


def latent(seed: int = 3, batch: int = 1) -> Tensor:
    return normal(batch, 16, 9, 14, seed=seed)


def path() -> list[Tensor]:
    """Latents that change by small steps and two large ones."""
    x, other = latent(), latent(seed=5)
    return [x + share * (other - x) for share in (0, 0.01, 0.02, 0.6, 0.61, 1.0, 1.01)]


def apart(got: Tensor, want: Tensor) -> float:
    return float((got - want).abs().max() / want.std())


def test_an_evaluation_that_repeats_gives_the_same_and_runs_one_block(network: nn.Module) -> None:
    want, cache, ran = evaluate(network, latent()), cache_of(network, 1e-3), set()
    with cache.caching():
        run(network, cache, [latent()])
        handles = [
            module.register_forward_hook(lambda *_, name=name: ran.add(name))
            for name, module in network.named_modules()
            if "_blocks." in f".{name}" and name.count(".") > 1
        ]
        (got,) = run(network, cache, [latent()])
    for handle in handles:
        handle.remove()
    assert [cache.skipped, cache.evaluations] == [1, 2]
    assert apart(got, want) <= EXACT
    assert ran
    assert all(name.startswith("transformer_blocks.0.") for name in ran)


def test_it_equals_diffusers_first_block_cache(network: nn.Module) -> None:
    """Only for one picture on one process: diffusers decides by the mean of all pictures, and by a rank's tokens."""
    cache = cache_of(network, 0.2)
    with cache.caching():
        got = run(network, cache, path())
    want = []
    network.enable_cache(FirstBlockCacheConfig(threshold=0.2))  # type: ignore[operator]
    for x in path():
        with network.cache_context("one"):  # type: ignore[operator]
            want.append(evaluate(network, x))
    network.disable_cache()  # type: ignore[operator]
    for module in network.modules():
        vars(module).pop("forward", None)  # which disable_cache leaves behind
    assert 0 < cache.skipped < cache.evaluations - 1
    assert max(map(apart, got, want)) <= EXACT


def test_branches_do_not_mix(network: nn.Module) -> None:
    """Two prompts in turn each skip by their own last evaluation, though the other's differs much."""
    latents = {"positive": latent(), "negative": latent(seed=6)}
    want = [evaluate(network, x) for x in latents.values()]
    cache = cache_of(network, 1e-3)
    with cache.caching():
        for branch, x in latents.items():
            run(network, cache, [x], branch)
        got = [run(network, cache, [x], branch)[0] for branch, x in latents.items()]
    assert [cache.skipped, cache.evaluations] == [2, 4]
    assert max(map(apart, got, want)) <= EXACT


def test_a_branch_that_a_prediction_did_not_evaluate_is_dropped(network: nn.Module) -> None:
    """The cache does not grow with the steps, though windows over a video may move in every one."""
    cache = cache_of(network, 1e-3)
    with cache.caching():
        for branches in (["one", "two"], ["one"], ["one", "two"], ["two"]):
            cache.begin_prediction()
            for branch in branches:
                run(network, cache, [latent()], branch)
    assert [cache.skipped, cache.evaluations] == [3, 6]


def test_a_batch_is_evaluated_fully_where_one_picture_changes(network: nn.Module) -> None:
    """A picture that is skipped alone is not skipped where another one of its batch changes much."""
    first, second = latent(batch=2), latent(batch=2)
    second[1] += 0.3 * normal(16, 9, 14, seed=7)
    change = smallest_threshold(network, first[1:], second[1:])
    assert skipped(network, 0.9 * change, [first, second]) == 0
    assert skipped(network, 1.1 * change, [first, second]) == 1
    assert skipped(network, 0.9 * change, [first[:1], second[:1]]) == 1


def test_nan_is_never_skipped(network: nn.Module) -> None:
    cache = cache_of(network, 1.0)
    with cache.caching():
        run(network, cache, [latent() * float("nan")] * 3)
    assert [cache.skipped, cache.evaluations] == [0, 3]


def test_a_run_leaves_no_cache_or_hooks_behind_even_when_it_fails(network: nn.Module) -> None:
    plain, cache = evaluate(network, latent()), cache_of(network, 0.2)
    with cache.caching():
        first = run(network, cache, path())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), cache.caching():
        run(network, cache, [latent(), latent()[:, :5]])
    with cache.caching():
        again = run(network, cache, path())
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(evaluate(network, latent()), plain)
    assert not [module for module in network.modules() if "forward" in vars(module)]


def smallest_threshold(network: nn.Module, first: Tensor, second: Tensor) -> float:
    """Returns the relative change of the first block's residual of image tokens, measured with a hook."""
    seen: list[Tensor] = []

    def watch(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], out: tuple[Tensor, Tensor]) -> None:
        seen.append((out[1] - kwargs["hidden_states"]).double())

    handle = network.transformer_blocks[0].register_forward_hook(watch, with_kwargs=True)  # type: ignore[index, union-attr]
    for x in (first, second):
        evaluate(network, x)
    handle.remove()
    before, after = seen
    return float((after - before).abs().sum() / before.abs().sum())


def skipped(network: nn.Module, threshold: float, latents: list[Tensor]) -> int:
    cache = cache_of(network, threshold)
    with cache.caching():
        run(network, cache, latents)
    return cache.skipped
