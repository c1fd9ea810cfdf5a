"""What tells one VAE from all others is of its weights alone: not of where they lie, nor of how they are strided."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from parallel_runtime.witness import SAMPLES, witness

from .second_device import OnSecondDevice


def network(seed: int = 0) -> nn.Module:
    """Weights of fewer, of more and of many more values than are looked at."""
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Conv2d(8, 16, 3), nn.Conv2d(16, 5, 3))
    made.register_buffer("steps", torch.arange(7))
    assert made[2].weight.numel() > 2 * SAMPLES
    return made


def changed(change: Callable[[Tensor], Tensor], which: Callable[[int], bool]) -> nn.Module:
    made = network()
    names = [name for name, _ in made.named_parameters()]
    for place, name in enumerate(names):
        path, _, last = name.rpartition(".")
        if which(place):
            module = made.get_submodule(path)
            module._parameters[last] = nn.Parameter(change(module._parameters[last].data), requires_grad=False)
    return made


def strided(weight: Tensor) -> Tensor:
    """The same values, and other ones between them."""
    room = torch.full((*weight.shape, 3), torch.nan)
    room[..., 1] = weight
    return room[..., 1]


PARTS = {
    "all of them": lambda place: True,
    "every second one": lambda place: place % 2 == 0,
    "the others": lambda place: place % 2 == 1,
    "the last one": lambda place: place == 7,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("which", list(PARTS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_may_lie_on_two_devices(dtype: torch.dtype, which: str) -> None:
    apart = changed(OnSecondDevice, PARTS[which])
    assert any(weight.device.type == "meta" for weight in apart.parameters())
    assert witness(apart, dtype) == witness(network(), dtype)


@pytest.mark.parametrize("which", list(PARTS))
@pytest.mark.parametrize(
    "change",
    [
        strided,
        lambda weight: OnSecondDevice(strided(weight)),
        lambda weight: weight.mT.contiguous().mT if weight.ndim > 1 else weight,
    ],
    ids=["with gaps", "with gaps on another device", "columns first"],
)
def test_weights_may_be_strided(change: Callable[[Tensor], Tensor], which: str) -> None:
    assert witness(changed(change, PARTS[which]), torch.bfloat16) == witness(network(), torch.bfloat16)


@pytest.mark.parametrize("place", range(8))
def test_another_weight_is_told_wherever_it_lies(place: int) -> None:
    other = changed(lambda weight: weight + 1, lambda each: each == place)
    there = changed(lambda weight: OnSecondDevice(weight + 1), lambda each: each == place)
    assert witness(other, torch.bfloat16) != witness(network(), torch.bfloat16)
    assert witness(there, torch.bfloat16) == witness(other, torch.bfloat16)


def test_weights_that_changed_places_are_told() -> None:
    swapped = network()
    first, last = swapped[0], swapped[1]
    first.bias, last.bias = last.bias, first.bias
    assert witness(swapped, torch.float32) != witness(network(), torch.float32)
