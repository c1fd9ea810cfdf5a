"""What each rank does in the tests of UNets' ControlNets, in ComfyUI's python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from parallel_runtime.architectures import control_plan_of
from parallel_runtime.architectures.row_plan import ControlRowPlan
from parallel_runtime.engine.parallelize import parallelize_control, unparallelize
from parallel_runtime.engine.rows.row_division import ControlRowDivision, RowDivision

from ..engine.meshes import mesh, parallelism
from ..zoo import row_calls
from ..zoo.control_nets import low_rank_control, of_unet
from . import unet_patches
from .unet_cases import _division, _double, _error

Residuals = dict[str, list[Tensor]]
LORA = "Control-LoRA"


@lru_cache(1)
def nets(name: str) -> tuple[nn.Module, nn.Module]:
    """A UNet of the zoo, and a ControlNet for it, whose residuals are as large as what they are added to."""
    if name == LORA:
        model = unet_patches.model()
        return model.diffusion_model, _control_lora(model)
    union = {"union_controlnet_num_control_type": 6} if name == "union" else {}
    return row_calls.made(name), of_unet(name, **union)


def _control_lora(model: Any) -> nn.Module:
    """Of ComfyUI's, once a run has begun: its own layers, and those of the UNet with a pair of matrices on each."""
    from comfy.controlnet import ControlLora

    made = ControlLora(low_rank_control(of_unet("SD1.5").state_dict()))
    made.pre_run(model, lambda percent: percent)
    return made.control_model.eval().requires_grad_(False)


def inputs(name: str, rows: int, columns: int, batch: int, hints: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the UNet is called with, and its ControlNet."""
    of_unet = row_calls.unet("SD1.5" if name == LORA else name, rows, columns, batch)
    hint = torch.rand(hints, 3, 8 * rows, 8 * columns, generator=torch.Generator().manual_seed(rows))
    return of_unet, of_unet | {"hint": hint} | ({"control_type": [1]} if name == "union" else {})


def apart(
    rank: int, world: int, name: str, ring: int, ulysses: int, sizes: Sequence[Sequence[int]], **more: Any
) -> list[dict[str, float]]:
    """Of each size (rows, columns, batch, pictures): how far the undivided float32 residuals are from float64, the
    divided ones from both, and the UNet's answer with divided ones from that with undivided ones."""
    unet, control = nets(name)
    errors = []
    with torch.inference_mode():
        for size in sizes:
            of_unet, of_control = inputs(name, *size)
            plain = _called(control, of_control)
            exact = _called(control.double(), _double(of_control))
            control.float()
            wanted = _answer(unet, of_unet, plain)
            with _division(unet, ring, ulysses, **more), divided(control, unet, ring, ulysses, **more) as division:
                own = _called(control, of_control)
                answer = _answer(unet, of_unet, own)
                levels = division._unet.levels_of(of_unet["x"].shape)
                assert levels is None or all(levels.is_level(x) for kind in own for x in own[kind])
                full = {k: [x if levels is None else levels.gather(x) for x in each] for k, each in own.items()}
            errors.append(
                {
                    "floor": _furthest(plain, exact),
                    "error": _furthest(full, exact),
                    "from plain": _furthest(full, plain),
                    "answer": _error(answer, wanted),
                    "does": _error(_answer(unet, of_unet, None), wanted),
                    "left": _furthest(_called(control, of_control), plain),
                }
            )
    return errors


def patched(rank: int, world: int, ring: int, ulysses: int, size: Sequence[int]) -> dict[str, float]:
    """With a node that has the UNet compute whole pictures in its middle: from the undivided UNet's answer."""
    unet, control = nets(LORA)
    of_unet, of_control = inputs(LORA, *size)
    options = unet_patches.options_of(unet_patches.PATCHES["Deep Shrink"])
    with torch.inference_mode():
        plain = _called(control, of_control)
        wanted = _answer(unet, of_unet, plain, options)
        with _division(unet, ring, ulysses), divided(control, unet, ring, ulysses):
            answer = _answer(unet, of_unet, _called(control, of_control), options)
    return {"error": _error(answer, wanted), "does": _error(_answer(unet, of_unet, None, options), wanted)}


@contextmanager
def divided(
    control: nn.Module, unet: nn.Module, ring: int, ulysses: int, shares: Sequence[int] = (), **options: Any
) -> Iterator[ControlRowDivision]:
    plan, division = control_plan_of(control), unet._context_parallel
    assert isinstance(plan, ControlRowPlan)
    assert isinstance(division, RowDivision)
    degrees = parallelism(ring, ulysses, 1, shares, **options)
    parallelize_control(control, plan, unet, mesh(ring, ulysses, 1, shares), degrees)
    try:
        yield control._context_parallel  # type: ignore[misc]
    finally:
        unparallelize(control)


def _called(control: nn.Module, given: dict[str, Any]) -> Residuals:
    returned: Residuals = control(**{k: v.clone() if isinstance(v, Tensor) else v for k, v in given.items()})
    return returned


def _answer(
    unet: nn.Module, given: dict[str, Any], control: Residuals | None, options: dict[str, Any] | None = None
) -> Tensor:
    own = None if control is None else {kind: list(residuals) for kind, residuals in control.items()}
    out: Tensor = unet(**given, control=own, transformer_options={} if options is None else dict(options))
    return out


def _furthest(residuals: Residuals, wanted: Residuals) -> float:
    return max(_error(a, b) for kind in wanted for a, b in zip(residuals[kind], wanted[kind], strict=True))
