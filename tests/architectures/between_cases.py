"""What is done between blocks and around attention, divided and not, in ComfyUI's python."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from parallel_runtime.engine.parallelize import parallelize, unparallelize
from parallel_runtime.errors import Refused
from parallel_runtime.request import AttentionBackend

from ..engine.meshes import mesh, parallelism
from .cases import divided_forward, error, forward, made, plan_of

Arguments = dict[str, Any]


def mixing(arguments: Arguments) -> Arguments:
    """A patch that needs its neighbours' tokens."""
    return arguments | {"img": arguments["img"] + 0.3 * arguments["img"].roll(1, 1)}


def leaving_out(arguments: Arguments, _: Any) -> Arguments:
    """What skip layer guidance does with a block."""
    return arguments


def mixing_around(arguments: Arguments, original: dict[str, Callable[[Arguments], Arguments]]) -> Arguments:
    before = arguments["img"].clone()
    out = original["original_block"](arguments | {"img": before + 0.1 * before.roll(1, 1)})
    return out | {"img": out["img"] + 0.3 * before.roll(2, 1)}


class EachToken:
    """A patch between or inside blocks that says that it computes each token by itself; it counts what it sees."""

    context_parallel = "each token"

    def __init__(self) -> None:
        self.tokens = 0

    def __call__(self, first: Any, *others: Tensor, **_: Any) -> Arguments:
        if isinstance(first, dict):
            self.tokens += first["img"].shape[1]
            return first | {"img": first["img"] * 1.5 + first["img"].tanh()}
        self.tokens += first.shape[2]
        return {"q": first * 2, "v": others[1].tanh()}


REPLACES = {"leaving out": leaving_out, "mixing": mixing_around}


def patched(rank: int, world: int, name: str, kind: str, ring: int, ulysses: int) -> float:
    network, inputs = made(name)
    options = {"patches": {kind: [mixing]}}
    wants = forward(network, inputs, **options)
    assert error(wants, forward(network, inputs)) > 1e-3, "the patch changes nothing"
    return error(divided_forward(network, inputs, ring, ulysses, **options), wants)


def replaced(rank: int, world: int, name: str, how: str, blocks: list[list[Any]], ring: int, ulysses: int) -> float:
    network, inputs = made(name)
    options = {"patches_replace": {"dit": {(kind, number): REPLACES[how] for kind, number in blocks}}}
    wants = forward(network, inputs, **options)
    assert error(wants, forward(network, inputs)) > 1e-3, "nothing was replaced"
    return error(divided_forward(network, inputs, ring, ulysses, **options), wants)


def each_token(rank: int, world: int, name: str, kind: str, ring: int, ulysses: int) -> dict[str, Any]:
    network, inputs = made(name)
    alone, together = EachToken(), EachToken()
    wants = forward(network, inputs, patches={kind: [alone]})
    assert error(wants, forward(network, inputs)) > 1e-3, "the patch changes nothing"
    got = divided_forward(network, inputs, ring, ulysses, patches={kind: [together]})
    return {"error": error(got, wants), "tokens": (together.tokens, alone.tokens)}


def refused(rank: int, world: int, name: str, kind: str) -> str:
    network, inputs = made(name)
    try:
        divided_forward(network, inputs, world, 1, patches={kind: [mixing]})
    except Refused as why:
        return str(why)
    return ""


class Counting:
    """Somebody else's attention: ComfyUI's, with its output scaled, and it counts. Each head is computed by itself."""

    context_parallel = "each head"

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        self.calls += 1
        return 0.9 * func(*args, **kwargs)


def overridden(rank: int, world: int, name: str, ring: int, ulysses: int, says_so: bool = True) -> dict[str, Any]:
    """Another node's optimized_attention_override, in the divided network and in the plain one."""
    network, inputs = made(name)
    alone, together = Counting(), Counting()
    if not says_so:
        together.context_parallel = ""
    wants = forward(network, inputs, optimized_attention_override=alone)
    try:
        got = divided_forward(network, inputs, ring, ulysses, optimized_attention_override=together)
    except Refused as why:
        return {"refused": str(why)}
    return {"error": error(got, wants), "calls": (together.calls, alone.calls)}


def chosen_by_a_node(rank: int, world: int, function: str, ring: int, ulysses: int) -> dict[str, Any]:
    """ComfyUI's Model Attention Backend with this function of ComfyUI's, in the divided network and the plain one."""
    model = SimpleNamespace(model_options={"transformer_options": {}})
    patchers = importlib.import_module("comfy.model_patcher")
    attention = getattr(importlib.import_module("comfy.ldm.modules.attention"), function)
    patchers.ModelPatcher.set_model_optimized_attention(model, attention)
    options: Any = model.model_options["transformer_options"]
    network, inputs = made("flux")
    try:
        return {"error": error(divided_forward(network, inputs, ring, ulysses, **options), forward(network, inputs))}
    except Refused as why:
        return {"refused": str(why)}


def names_restored(rank: int, world: int) -> dict[str, Any]:
    """ERNIE-Image's attention is found by its name: two networks divided, and undivided in the order of their birth."""
    module = importlib.import_module("comfy.ldm.ernie.model")
    before = module.optimized_attention
    (first, inputs), (second, _) = made("ernie image"), made("ernie image")
    wants = forward(first, inputs)
    for network in (first, second):
        parallelize(network, plan_of(network).plan, mesh(world, 1), parallelism(world, 1))
    unparallelize(first)
    wrapped = module.optimized_attention is not before
    errors = [error(forward(network, inputs), wants) for network in (first, second)]
    unparallelize(second)
    return {"wrapped": wrapped, "errors": errors, "restored": module.optimized_attention is before}


def after_an_exception(rank: int, world: int) -> dict[str, Any]:
    """A forward that fails in the middle leaves nothing behind for the next one."""
    network, inputs = made("flux")
    wants = forward(network, inputs)
    parallelize(network, plan_of(network).plan, mesh(world, 1), parallelism(world, 1))
    block: Any = network.get_submodule("single_blocks.0")
    handle = block.linear2.register_forward_hook(_fail)
    try:
        forward(network, inputs)
    except RuntimeError as raised:
        message = str(raised)
    handle.remove()
    shorter = inputs | {"context": inputs["context"][:, :3], "x": inputs["x"][:, :, :9]}
    got = [error(forward(network, given), wants) for given in (inputs,)]
    forward(network, shorter)
    unparallelize(network)
    return {"said": message, "error": max(got)}


def _fail(*_: Any) -> None:
    raise RuntimeError("out of memory, say")


def twice(rank: int, world: int) -> str:
    network, _ = made("flux")
    parallelize(network, plan_of(network).plan, mesh(world, 1), parallelism(world, 1))
    try:
        parallelize(network, plan_of(network).plan, mesh(world, 1), parallelism(world, 1))
    except ValueError as why:
        return str(why)
    return ""


def chosen_backend(rank: int, world: int, name: str, ring: int, ulysses: int) -> float:
    """attention_backend "native": our own kernel also where keys are whole."""
    network, inputs = made(name)
    wants = forward(network, inputs)
    parallelize(
        network, plan_of(network).plan, mesh(ring, ulysses), parallelism(ring, ulysses, attention_backend="native")
    )
    got = forward(network, inputs)
    unparallelize(network)
    return error(got, wants)


def foreign_masks(rank: int, world: int) -> str:
    """A mask that a block made of its own tokens alone cannot be put together."""
    network, inputs = made("flux redux")
    inputs["attention_mask"] = inputs["attention_mask"][:, :50, :50]
    try:
        divided_forward(network, inputs, world, 1)
    except ValueError as why:
        return str(why)
    return ""


class ComfyAttention(nn.Module):
    """As newer versions of ComfyUI put it into a network: an attention that the file chooses, or None."""

    function: Callable[..., Tensor] | None = None


def own_attention(
    rank: int,
    world: int,
    chosen: bool,
    overridden: bool = False,
    backend: AttentionBackend = "auto",
    ring: int = 1,
) -> dict[str, Any]:
    """A network whose second block may have chosen its attention, which is called instead of ComfyUI's own where nobody
    overrides: natively by ComfyUI's wrapper, as newer versions have it."""
    network, inputs = made("flux")
    options = {"optimized_attention_override": Counting()} if overridden else {}
    block: Any = network.get_submodule("double_blocks.1")
    comfyui = importlib.import_module("comfy.ldm.modules.attention").optimized_attention
    calls: list[int] = []

    def attention_int8(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(len(calls))
        return 0.9 * comfyui(*args, **kwargs)

    def native(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return attention_int8(*args, **kwargs) if block.busy else function(*args, **kwargs)

    if chosen and not overridden and backend == "auto":
        with _busy(block):
            wants = forward(network, inputs, optimized_attention_override=native)
    else:
        wants = forward(network, inputs, **options)
    alone = len(calls)
    block.comfy_attention = ComfyAttention()
    block.comfy_attention.function = attention_int8 if chosen else None
    degrees = ring, world // ring
    parallelize(network, plan_of(network).plan, mesh(*degrees), parallelism(*degrees, attention_backend=backend))
    try:
        return {"error": error(forward(network, inputs, **options), wants), "calls": [alone, len(calls) - alone]}
    except Refused as why:
        return {"refused": str(why)}
    finally:
        unparallelize(network)


@contextmanager
def _busy(block: Any) -> Iterator[None]:
    """While `block` computes, its `busy` is set."""
    block.busy = False
    handles = [
        block.register_forward_pre_hook(lambda *_: setattr(block, "busy", True)),
        block.register_forward_hook(lambda *_: setattr(block, "busy", False)),
    ]
    yield
    for handle in handles:
        handle.remove()


torch.set_grad_enabled(False)
