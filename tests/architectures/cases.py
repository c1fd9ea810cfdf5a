"""What each rank does in the tests of networks, in ComfyUI's python."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from parallel_runtime.accelerators import KERNELS
from parallel_runtime.architectures import Architecture, architecture_of
from parallel_runtime.architectures.split_plan import Gather, SplitPlan
from parallel_runtime.engine.attention.attention_override import backend_override
from parallel_runtime.engine.attention.dispatch import attend_block, attend_native
from parallel_runtime.engine.attention.registry import FUNCTIONS, KernelFunction
from parallel_runtime.engine.parallelize import parallelize, unparallelize
from parallel_runtime.engine.split import splitter
from parallel_runtime.engine.split.streams import streams_of

from ..engine.meshes import mesh, parallelism
from ..zoo import tiny

tiny.start_comfyui()
from ..zoo.calls import CASES, Inputs  # noqa: E402


def parity(rank: int, world: int, name: str, ring: int, ulysses: int, shares: Sequence[int] = ()) -> dict[str, Any]:
    """How far the divided network is from the plain one, and the plain one afterwards from itself."""
    network, inputs = made(name)
    plain = forward(network, inputs)
    together = divided_forward(network, inputs, ring, ulysses, shares)
    again = forward(network, inputs)
    return {"error": error(together, plain), "left": error(again, plain), "bits": digest(together)}


def planned(rank: int, world: int, name: str, text: int) -> dict[str, Any]:
    """What planning knows of a network, and how long the streams were that a forward over the ranks cut."""
    network, inputs = made(name)
    known, cut = plan_of(network), {}
    parallelize(network, known.plan, mesh(world, 1), parallelism(world, 1))
    network.register_forward_hook(lambda net, *_: cut.update(streams_of(net).lengths), prepend=True)  # type: ignore[union-attr]
    forward(network, inputs)
    unparallelize(network)
    latent = inputs["x"][0] if isinstance(inputs["x"], list) else inputs["x"]
    return {
        "tokens": known.tokens(network, latent.shape, text),
        "cut": cut,
        "main": known.plan.main_stream,
        "layers": known.layers(network),
        "head size": known.width(network) / known.heads(network),
    }


def in_float8(rank: int, world: int, name: str, ring: int, ulysses: int) -> dict[str, Any]:
    """How far the network is from the plain one where keys, values and heads are sent in float8."""
    network, inputs = made(name)
    plain = forward(network, inputs)
    options = {"comm_dtype": "float8_e4m3fn"}
    parallelize(network, plan_of(network).plan, mesh(ring, ulysses), parallelism(ring, ulysses, **options))
    try:
        together = forward(network, inputs)
    finally:
        unparallelize(network)
    return {"error": error(together, plain), "bits": digest(together)}


class _Low(KernelFunction):
    """A kernel of low precision for every device; it counts its calls by their keys."""

    def unsupported_reason(self, *_: Any, **__: Any) -> str:
        return ""


def low_precision(rank: int, world: int, name: str) -> dict[str, list[int]]:
    """Keys of the calls that a kernel of low precision gets, of the undivided network, over Ulysses and in a ring."""
    keys: list[int] = []

    def counting(
        q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, with_lse: bool
    ) -> tuple[Tensor, Tensor | None]:
        keys.append(k.shape[1])
        if not with_lse:
            return attend_native(q, k, v, mask, scale), None
        out, lse = attend_block(q, k, v, None, scale, "native")
        return out, lse.squeeze(-1).transpose(1, 2)

    network, inputs = made(name)
    before, got = FUNCTIONS["sage"], {}
    FUNCTIONS["sage"] = _Low(spec=KERNELS["sage"], function=counting)
    try:
        forward(network, inputs, optimized_attention_override=backend_override("sage"))
        got["undivided"] = sorted(set(keys))
        for degrees in ((1, world), (world, 1)):
            parallelize(network, plan_of(network).plan, mesh(*degrees), parallelism(*degrees, attention_backend="sage"))
            keys.clear()
            forward(network, inputs)
            got["ring" if degrees[0] > 1 else "ulysses"] = sorted(set(keys))
            unparallelize(network)
    finally:
        FUNCTIONS["sage"] = before
    return got


def made(name: str) -> tuple[nn.Module, Inputs]:
    network = CASES[name].network()
    tiny.seed(11)
    return network, CASES[name].inputs()


def plan_of(network: nn.Module) -> Architecture:
    architecture = architecture_of(network)
    assert architecture is not None, type(network)
    return architecture


def divided_forward(
    network: nn.Module, inputs: Inputs, ring: int, ulysses: int, shares: Sequence[int] = (), **options: Any
) -> list[Tensor]:
    degrees = (ring, ulysses, 1, tuple(shares))
    parallelize(network, plan_of(network).plan, mesh(*degrees), parallelism(*degrees))
    try:
        return forward(network, inputs, **options)
    finally:
        unparallelize(network)


@torch.inference_mode()
def forward(network: nn.Module, inputs: Inputs, **options: Any) -> list[Tensor]:
    out = network(**copied(inputs), transformer_options=dict(options))
    return [out] if isinstance(out, Tensor) else list(out)


def error(got: list[Tensor], want: list[Tensor]) -> float:
    """The largest difference, as a share of the largest value."""
    assert [x.shape for x in got] == [x.shape for x in want]
    worst = max((((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, want, strict=True)))
    return worst if worst == worst else float("inf")


def digest(tensors: list[Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: copied(item) for name, item in value.items()}
    return type(value)(map(copied, value)) if isinstance(value, (list, tuple)) else value


def gathered_bytes(rank: int, world: int, name: str, option: str = "") -> dict[str, Any]:
    """Bytes that a forward gathers from all ranks by its plan, and by one that gathers what its last layers are given;
    and how far both are from the plain network. `option` is one of `OPTIONS`."""
    network, inputs = made(name)
    plan, options = plan_of(network).plan, OPTIONS[option]
    plain, answers = forward(network, inputs, **options), {}
    for which, tried in (("after", plan), ("before", _gathering_first(plan))):
        counted: list[int] = []
        original = splitter.all_gather_v

        def counting(*args: Any, before: Any = original, into: list[int] = counted) -> Any:
            full = before(*args)
            into.append(full.nbytes)
            return full

        splitter.all_gather_v = counting
        parallelize(network, tried, mesh(world, 1), parallelism(world, 1))
        try:
            answers[f"error {which}"] = error(forward(network, inputs, **options), plain)
        finally:
            unparallelize(network)
            splitter.all_gather_v = original
        answers[which] = sum(counted)
    return answers


def _leave_out(arguments: dict[str, Any], _: Any) -> dict[str, Any]:
    return arguments


def _mix(arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments | {"img": arguments["img"] + 0.3 * arguments["img"].roll(1, 1)}


OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "all blocks left out": {
        "patches_replace": {
            "dit": {(kind, n): _leave_out for kind in ("double_block", "single_block") for n in range(64)}
        }
    },
    "a patch that sees all tokens": {"patches": {"double_block": [_mix]}},
}


def _gathering_first(plan: SplitPlan) -> SplitPlan:
    """The plan whose last layers are given all tokens."""
    return replace(
        plan,
        module_plans=tuple(
            replace(
                each,
                args={
                    name: replace(spec, after=False, ranges=())
                    for name, spec in each.args.items()
                    if isinstance(spec, Gather)
                },
            )
            if each.tail is not None
            else each
            for each in plan.module_plans
        ),
    )
