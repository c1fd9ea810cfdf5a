"""What tells one VAE from all others is of its weights alone: not of where they lie, nor of how they are strided."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from parallel_runtime.loading.fingerprint import (
    SAMPLES,
    file_fingerprint,
    fingerprint,
    model_fingerprint,
)

from ..second_device import OnSecondDevice


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
    spaced = torch.full((*weight.shape, 3), torch.nan)
    spaced[..., 1] = weight
    return spaced[..., 1]


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
    assert model_fingerprint(apart, dtype) == model_fingerprint(network(), dtype)


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
    assert model_fingerprint(changed(change, PARTS[which]), torch.bfloat16) == model_fingerprint(
        network(), torch.bfloat16
    )


@pytest.mark.parametrize("place", range(8))
def test_another_weight_is_told_wherever_it_lies(place: int) -> None:
    other = changed(lambda weight: weight + 1, lambda each: each == place)
    on_second = changed(lambda weight: OnSecondDevice(weight + 1), lambda each: each == place)
    assert model_fingerprint(other, torch.bfloat16) != model_fingerprint(network(), torch.bfloat16)
    assert model_fingerprint(on_second, torch.bfloat16) == model_fingerprint(other, torch.bfloat16)


def test_weights_that_changed_places_are_told() -> None:
    swapped = network()
    first, last = swapped[0], swapped[1]
    first.bias, last.bias = last.bias, first.bias
    assert model_fingerprint(swapped, torch.float32) != model_fingerprint(network(), torch.float32)


def test_a_layer_whose_bias_was_registered_before_its_weight_is_the_same_layer() -> None:
    """With dynamic VRAM ComfyUI makes a Linear without parameters, and adds them as they follow one another in the
    file: CP CLIP and CP VAE ran in ComfyUI's process on every NVIDIA GPU."""
    other = network()
    for layer in other:
        if layer._parameters:
            layer._parameters = dict(reversed(layer._parameters.items()))
    assert list(other.state_dict()) != list(network().state_dict())
    assert model_fingerprint(other, torch.float32) == model_fingerprint(network(), torch.float32)


def test_a_fingerprint_is_of_values_in_their_order_and_of_none_at_all() -> None:
    full = torch.arange(6.0).view(2, 3)
    assert fingerprint(full, "a") == fingerprint(full.mT.contiguous().mT, b"a") == fingerprint(*full, "a")
    assert fingerprint(full[:0], torch.tensor(1.0)) == fingerprint(torch.ones(1))
    assert len({fingerprint(full), fingerprint("a", full), fingerprint(full, "a"), fingerprint(full + 1)}) == 4


def test_a_file_is_told_from_one_that_differs_in_size_or_in_a_piece(tmp_path: Path) -> None:
    contents = [bytes(1 << 20), bytes((1 << 20) + 1), bytes(1 << 19) + b"\1" * (1 << 19), b""]
    paths = [tmp_path / str(index) for index in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    assert len({file_fingerprint(str(path)) for path in paths}) == len(paths)
    assert file_fingerprint(str(paths[0])) == file_fingerprint(str(paths[0]))
