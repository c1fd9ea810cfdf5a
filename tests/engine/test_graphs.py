"""What a forward makes in main memory and sends to its device: locked once, and the same in every replay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from parallel_runtime.engine.cuda_graphs import Constants

AWAY = torch.device("meta")  # a device that is not the CPU, and is always there


def with_rows(x: Tensor, rows: object, value: object) -> Tensor:
    x[rows] = value  # type: ignore[index, assignment]  # lists are indices, too
    return x


SENT: dict[str, Callable[[Tensor], Tensor]] = {
    "to a tensor": lambda x: torch.arange(4).to(x),
    "to a device": lambda x: torch.arange(4).to(AWAY),
    "to a device and dtype": lambda x: torch.arange(4).to(AWAY, torch.bfloat16),
    "by name": lambda x: torch.arange(4).to(device="meta", dtype=torch.float16),
    "made there": lambda x: torch.tensor([1, 2, 3], device=AWAY),
    "copied": lambda x: torch.zeros(4, device=AWAY).copy_(torch.ones(4)),
    "made there by name": lambda x: torch.tensor(data=[1, 2, 3], device=AWAY),
    "made like it": lambda x: x.new_tensor([1, 2, 3]),
    "of its type": lambda x: torch.arange(4).type_as(x),
    "a mask": lambda x: torch.ones(4, dtype=torch.bool).to(AWAY),
    "an index": lambda x: x.expand(3, 2)[:, [0, 1, 1]],
    "an index on the CPU": lambda x: x[torch.tensor([1, 0, 1])],
    "rows written": lambda x: with_rows(x.repeat(3, 1), [0, 2], 1.0),
    "a row written from the CPU": lambda x: with_rows(x.repeat(3, 1), 1, torch.ones(2)),
}


def kept() -> tuple[Constants, list[Tensor]]:
    pinned: list[Tensor] = []

    def pin(made: Tensor) -> Tensor:
        pinned.append(made.clone())
        return pinned[-1]

    return Constants(pin), pinned


@pytest.mark.parametrize("how", list(SENT))
def test_each_is_locked_once_and_found_again(how: str) -> None:
    x = torch.zeros(2, device=AWAY)
    plain = SENT[how](x)
    constants, pinned = kept()
    with constants:
        rehearsed = SENT[how](x)
    with constants.for_capture():
        captured = SENT[how](x)
    assert len(pinned) == 1
    assert not any(tensor.is_meta for tensor in pinned)
    for got in (rehearsed, captured):
        assert (got.device, got.dtype, got.shape) == (plain.device, plain.dtype, plain.shape)


def test_what_stays_on_the_cpu_or_on_the_device_is_nobodys_business() -> None:
    constants, pinned = kept()
    with constants:
        assert torch.arange(4).to(torch.float64).dtype == torch.float64
        torch.zeros(2, device=AWAY).to(torch.float16)
        torch.as_tensor(torch.zeros(2, device=AWAY), device=AWAY)
        torch.tensor([1, 2])
        torch.tensor(data=[1, 2])
        torch.arange(4)[[1, 2]]
        x = torch.zeros(4, device=AWAY)
        x[torch.tensor(2)], x[1:], x[..., None]
        x[1] = 3.0
        x.new_tensor([1, 2], device="cpu")
    assert pinned == []


@pytest.mark.parametrize("other", [torch.arange(5), torch.arange(4) + 1], ids=["shape", "value"])
def test_another_constant_the_second_time_is_no_constant(other: Tensor) -> None:
    constants, _ = kept()
    with constants:
        torch.arange(4).to(AWAY)
    with constants.for_capture(), pytest.raises(RuntimeError, match="other numbers from main memory each time"):
        other.to(AWAY)
    with constants.for_capture():
        torch.arange(4).to(AWAY)
        with pytest.raises(RuntimeError, match="other numbers from main memory each time"):
            torch.arange(4).to(AWAY)


def test_too_many_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Constants, "MAX_BYTES", 100)
    constants, pinned = kept()
    with constants:
        for _ in range(50):
            assert torch.ones(16).to(AWAY).is_meta
    assert sum(tensor.nbytes for tensor in pinned) < 200
    with pytest.raises(RuntimeError, match="from main memory"), constants.for_capture():
        pass
