"""What each rank does in the tests of UNets, in ComfyUI's python."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from parallel_runtime.architectures import architecture_of
from parallel_runtime.architectures.row_plan import RowPlan
from parallel_runtime.engine import graph_runner
from parallel_runtime.engine.comm import collectives
from parallel_runtime.engine.graph_runner import GraphRunner
from parallel_runtime.engine.parallelize import parallelize, unparallelize

from ..engine.meshes import mesh, parallelism
from ..site.tape import record_with_tapes
from ..zoo import tiny

tiny.start_comfyui()
from ..zoo import row_calls  # noqa: E402
from . import unet_patches  # noqa: E402


def apart(
    rank: int, world: int, name: str, ring: int, ulysses: int, sizes: Sequence[Sequence[int]], **more: Any
) -> list[dict[str, float]]:
    """Of each size (rows, columns, batch): how far the undivided float32 run is from float64, and the divided one from
    both, as shares of the standard deviation."""
    network = row_calls.made(name)
    errors = []
    with torch.inference_mode():
        for size in sizes:
            given = row_calls.unet(name, *size)
            exact = network.to(torch.float64)(**_double(given), transformer_options={})
            network.to(torch.float32)
            plain = network(**given, transformer_options={})
            divided = _divided(network, given, {}, ring, ulysses, **more)
            left = network(**given, transformer_options={})
            errors.append(
                {
                    "floor": _error(plain, exact),
                    "error": _error(divided, exact),
                    "from plain": _error(divided, plain),
                    "left": _error(left, plain),
                }
            )
    return errors


def _divided(network: nn.Module, given: dict[str, Any], options: dict[str, Any], *degrees: int, **more: Any) -> Tensor:
    with _division(network, *degrees, **more):
        return network(**given, transformer_options=options)


@contextmanager
def _division(
    network: nn.Module, ring: int, ulysses: int, shares: Sequence[int] = (), **options: Any
) -> Iterator[None]:
    known = architecture_of(network)
    assert known is not None
    assert isinstance(known.plan, RowPlan)
    degrees = parallelism(ring, ulysses, 1, shares, **options)
    parallelize(network, known.plan, mesh(ring, ulysses, 1, shares), degrees)
    try:
        yield
    finally:
        unparallelize(network)


def _double(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value.double() if isinstance(value, Tensor) else value for name, value in given.items()}


def _error(x: Tensor, wanted: Tensor) -> float:
    return float((x.double() - wanted).abs().max() / wanted.double().std())


def messages(
    rank: int, world: int, name: str, ring: int, ulysses: int, size: Sequence[int], **options: Any
) -> dict[str, int]:
    """How often this rank sends in a forward, how many bytes, and what asks for it."""
    network, sent, start = row_calls.made(name), [], collectives._start
    modules = list(network.modules())
    known = architecture_of(network)
    assert known is not None

    def counting(tensors: Mapping[int, Tensor], *others: Any) -> Any:
        sent.append(sum(tensor.nbytes for tensor in tensors.values()))
        return start(tensors, *others)

    with torch.inference_mode(), _division(network, ring, ulysses, **options):
        collectives._start = counting
        network(**row_calls.unet(name, *size), transformer_options={})
        collectives._start = start
    return {
        "messages": len(sent),
        "bytes": sum(sent),
        "norms": sum(isinstance(module, nn.GroupNorm) for module in modules),
        "samplings": sum(type(module).__name__ in ("Upsample", "Downsample") for module in modules),
        "attentions": known.layers(network),
    }


def patched(
    rank: int, world: int, name: str, ring: int, ulysses: int, size: Sequence[int], of: str = "SD1.5"
) -> dict[str, float]:
    """With one of unet_patches.PATCHES, or "control": how far the divided network is from the undivided one, and what
    the patch does to that."""
    network = unet_patches.model().diffusion_model if of == "SD1.5" else row_calls.made(of)
    given = row_calls.unet(of, *size)
    runs = []

    def once(options: dict[str, Any]) -> Tensor:
        torch.manual_seed(1)  # ToMe and HyperTile draw from the process's generator
        more = {"control": unet_patches.control(*size[:2])} if name == "control" else {}
        out: Tensor = network(**given, **more, transformer_options=options)
        runs.append(torch.randn(()))  # where the generator is left
        return out

    def options() -> dict[str, Any]:
        return {} if name == "control" else unet_patches.options_of(unet_patches.PATCHES[name])

    with torch.inference_mode():
        plain = network(**given, transformer_options={})
        wanted = once(options())
        with _division(network, ring, ulysses):
            got = once(options())
    assert torch.equal(*runs), "the random generator is elsewhere"
    return {"error": _error(got, wanted), "does": _error(plain, wanted)}


def seen_by_each_token(rank: int, world: int, ring: int, ulysses: int, size: Sequence[int]) -> list[int]:
    """How many tokens patches see that say that they compute each by itself: undivided, and divided."""
    network, given, seen = unet_patches.model().diffusion_model, row_calls.unet("SD1.5", *size), []
    options = unet_patches.options_of(unet_patches.PATCHES["each token"])
    with torch.inference_mode():
        for division in (nullcontext(), _division(network, ring, ulysses)):
            unet_patches.EachToken.seen = 0
            with division:
                network(**given, transformer_options=options)
            seen.append(unet_patches.EachToken.seen)
    return seen


def replayed(rank: int, world: int, name: str, ring: int, ulysses: int, size: Sequence[int]) -> dict[str, Any]:
    """The bits of two inputs, eager and by a tape's replays, and what the recording says of itself."""
    network, first = row_calls.made(name), row_calls.unet(name, *size)
    second = {key: value.flip(0) + 1 if key in ("x", "context") else value for key, value in first.items()}

    def out(given: dict[str, Any]) -> Tensor:
        copied = {key: value.clone() if isinstance(value, Tensor) else value for key, value in given.items()}
        made: Tensor = network(**copied, transformer_options={})
        return made

    with torch.inference_mode(), _division(network, ring, ulysses):
        eager = [out(given) for given in (first, second)]
        record_with_tapes(graph_runner)
        recorded = GraphRunner(network, torch.device("cpu"))
        try:
            out(first)  # eager
            out(first)  # recorded
            replays = [out(given) for given in (first, second)]
        finally:
            network._compiled_call_impl = None  # type: ignore[assignment]
    same = [torch.equal(*pair) for pair in zip(eager, replays, strict=True)]
    return {"same": same, "replays": recorded.stats.replays, "reasons": recorded.stats.eager}
