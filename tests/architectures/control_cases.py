"""What each rank does in the tests of ControlNets whose tokens are divided, in ComfyUI's python."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallel_runtime.architectures import control_plan_of
from parallel_runtime.architectures.split_plan import SplitPlan
from parallel_runtime.engine.comm.collectives import all_gather_v
from parallel_runtime.engine.parallelize import parallelize, parallelize_control, unparallelize
from parallel_runtime.engine.split.streams import chunk_sizes

from ..engine.meshes import mesh, parallelism
from ..zoo import calls, tiny
from ..zoo.networks import FLUX, HUNYUAN_DIT, QWEN, SD3, SD35_CONTROL
from ..zoo.tiny import build, make
from .cases import copied, error, plan_of
from .mutations import LOUD

TIMES = ("timestep", "timesteps", "t")  # what networks call it; ControlNets say timesteps
Residuals = dict[str, list[Tensor]]


@dataclass(frozen=True)
class Case:
    """A network with what it is given, its ControlNet, and the hint's shape; `given` is the ControlNet's alone."""

    network: Callable[[], nn.Module]
    control: Callable[[], nn.Module]
    inputs: Callable[[], calls.Inputs]
    hint: Sequence[int]
    given: calls.Inputs


def _flux(hint: Sequence[int], inputs: Any = calls.flux, given: Any = None, **config: Any) -> Case:
    control = partial(build, "ldm.flux.controlnet:ControlNetFlux", **FLUX | config)
    return Case(partial(make, "flux"), control, inputs, hint, given or {})


def _sd3(kind: str, **config: Any) -> Case:
    return Case(partial(make, "sd35_large"), partial(build, f"cldm.{kind}", **config), calls.sd3, LATENT, {})


def _even() -> calls.Inputs:
    return calls.flux(x=tiny.normal(2, 16, 18, 26))


UNION = {"latent_input": True, "num_union_modes": 4, "control_latent_channels": 16}
LATENT, PIXELS = (2, 16, 17, 23), (2, 3, 144, 208)
CASES = {
    "flux xlabs": _flux(PIXELS, _even, depth_single_blocks=0),
    "flux union": _flux(LATENT, given={"control_type": [1]}, **UNION),
    "flux union, references": _flux(LATENT, lambda: calls.flux(ref_latents=calls.references()), {"control_type": []},
                                    **UNION),
    "flux inpaint": _flux((2, 17, 17, 23), latent_input=True, control_latent_channels=17, depth_single_blocks=0),
    "flux mistoline": _flux(PIXELS, _even, mistoline=True),
    "qwen": Case(partial(make, "qwen"), partial(build, "ldm.qwen_image.controlnet:QwenImageControlNetModel", **QWEN),
                 calls.qwen, (2, 16, 1, 17, 23), {}),
    "qwen fun": Case(partial(make, "qwen"), partial(build, "ldm.qwen_image.controlnet:QwenImageFunControlNetModel",
                                                    inner_dim=192, num_attention_heads=3, attention_head_dim=64,
                                                    injection_layers=(0, 1)),
                     calls.qwen, (2, 16, 1, 17, 23), {"base_model": None}),
    "sd3": _sd3("mmdit:ControlNet", num_blocks=2, **SD3),
    "sd3.5 large": _sd3("dit_embedder:ControlNetEmbedder", double_y_emb=True, **SD35_CONTROL),
    "sd3.5": _sd3("dit_embedder:ControlNetEmbedder", double_y_emb=False, **SD35_CONTROL),
    "hunyuan dit": Case(partial(build, "ldm.hydit.models:HunYuanDiT", **HUNYUAN_DIT, depth=40),  # for its 19 residuals
                        partial(build, "ldm.hydit.controlnet:HunYuanControlNet", **HUNYUAN_DIT), calls.hunyuan_dit,
                        (2, 4, 17, 23), {}),
}  # fmt: skip


def made(name: str) -> tuple[nn.Module, nn.Module, calls.Inputs, calls.Inputs]:
    """The network, its ControlNet, and what each of them is given."""
    case = CASES[name]
    network, control = case.network(), case.control()
    tiny.seed(11)
    inputs = case.inputs()
    of_control = {key: value for key, value in inputs.items() if key not in (*TIMES, "ref_latents")}
    times = next(inputs[key] for key in TIMES if key in inputs)
    of_control |= {"timesteps": times, "hint": tiny.uniform(*case.hint)}
    given = {key: network if key == "base_model" else value for key, value in case.given.items()}
    return network, control, inputs, of_control | given


@torch.inference_mode()
def apart(
    rank: int, world: int, name: str, ring: int, ulysses: int, shares: Sequence[int] = ()
) -> dict[str, float | int]:
    """How far the divided residuals are from the undivided ones, the network's answer with them from that with those,
    and what the residuals do to it."""
    network, control, inputs, given = made(name)
    degrees = (ring, ulysses, 1, tuple(shares))
    plain = called(control, given)
    wants = answer(network, inputs, plain)
    with divided(network, control, control_plan_of(control), *degrees):
        own = called(control, given)
        got = answer(network, inputs, own)
        context = mesh(*degrees).context
        tokens = next(x.shape[1] for x in plain["input" if "input" in plain else "output"] if x is not None)
        sizes = chunk_sizes(tokens, context.parts)
        full = {kind: [None if x is None else _full(x, sizes, context) for x in own[kind]] for kind in own}
        bare = answer(network, inputs, None)
    return {
        "residuals": furthest(full, plain),
        "answer": error([got], [wants]),
        "does": error([bare], [wants]),
        "left": furthest(called(control, given), plain),
        "own": max(x.shape[1] for kind in own for x in own[kind] if x is not None),
        "all": tokens,
    }


def _full(own: Tensor, sizes: Sequence[int], context: Any) -> Tensor:
    return all_gather_v(own[:, : sizes[context.index]], tuple(sizes), context, 1)


@torch.inference_mode()
def survivors(rank: int, world: int, name: str) -> dict[str, float]:
    """{what was dropped from the plan: how wrong the network's answer is} of all that was not refused."""
    network, control, inputs, given = made(name)
    plan, wants = control_plan_of(control), answer(network, inputs, called(control, given))
    assert plan is not None
    errors = {}
    for module_plan in plan.module_plans:
        for word in module_plan.args:
            fewer = replace(
                module_plan, args={key: value for key, value in module_plan.args.items() if key != word}, updates=None
            )
            module_plans = tuple(fewer if other is module_plan else other for other in plan.module_plans)
            errors[f"{module_plan.name}: {word}"] = _wrong(name, replace(plan, module_plans=module_plans), wants)
    for module in plan.no_options:
        errors[module] = _wrong(name, replace(plan, no_options=()), wants)
    return {what: wrong for what, wrong in errors.items() if wrong is not None}


def _wrong(name: str, plan: SplitPlan, wants: Tensor) -> float | None:
    network, control, inputs, given = made(name)
    try:
        with divided(network, control, plan, 2, 1, 1, ()):
            return error([answer(network, inputs, called(control, given))], [wants])
    except LOUD:
        return None


@contextmanager
def divided(network: nn.Module, control: nn.Module, plan: SplitPlan | None, *degrees: Any) -> Iterator[None]:
    assert plan is not None
    parallelize(network, plan_of(network).plan, mesh(*degrees), parallelism(*degrees))
    try:
        parallelize_control(control, plan, network, mesh(*degrees), parallelism(*degrees))
        try:
            yield
        finally:
            unparallelize(control)
    finally:
        unparallelize(network)


def called(control: nn.Module, given: calls.Inputs) -> Residuals:
    base = {key: value for key, value in given.items() if key == "base_model"}
    returned: Residuals = control(**copied({k: v for k, v in given.items() if k not in base}), **base)
    return {kind: list(residuals) for kind, residuals in returned.items()}


def answer(network: nn.Module, inputs: calls.Inputs, control: Residuals | None) -> Tensor:
    own = None if control is None else {"input": [], "output": []} | {kind: list(x) for kind, x in control.items()}
    out: Tensor = network(**copied(inputs), control=own, transformer_options={})
    return out


def furthest(residuals: Residuals, wanted: Residuals) -> float:
    pairs = [pair for kind in wanted for pair in zip(residuals[kind], wanted[kind], strict=True) if pair[1] is not None]
    return error(*map(list, zip(*pairs, strict=True)))
