"""A part of the report is a row of cases: what is told of each, and what finds the rest. One that fails is told too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import ParallelError
from ..specs import ComfySetup

Row = dict[str, Any]  # by the names of page.py's columns, and "failed": why there is no more to tell

FAILURES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, OSError, ParallelError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip
ERRORS = ("error", "alone")
REST = "the rest of this part"
WORDS = 300  # characters of a failure


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a part is run with. `world` ranks have a GPU each, or with `one_card` all the first: then times say nothing.
    `comfyui` is a checkout, "" for none. On the CPU networks are tiny."""

    kind: str = "cuda"
    world: int = 1
    one_card: bool = False
    comfyui: str = ""
    tokens: int = 4608

    @property
    def tiny(self) -> bool:
        return self.kind == "cpu"

    @property
    def comfy(self) -> ComfySetup:
        """Started for the device that is measured."""
        flags = ("--cpu", "--use-pytorch-cross-attention") if self.kind == "cpu" else ()
        return ComfySetup(root=self.comfyui, flags=flags, folder=self.comfyui)

    @property
    def devices(self) -> tuple[str, ...]:
        """Of the ranks, in their order."""
        return tuple(
            "cpu" if self.kind == "cpu" else f"{self.kind}:{0 if self.one_card else rank}" for rank in range(self.world)
        )


class Case(NamedTuple):
    """What is told of it, what finds the rest, and what then takes its times, where no rank has failed."""

    told: Row
    find: Callable[[], Row]
    clock: Callable[[], Row] | None = None


def found(case: Case) -> Row:
    """The whole row, of all ranks. Collective."""
    row = of_all_ranks(case.told | _tried(case.find))
    if case.clock is None or "failed" in row:
        return row
    return of_all_ranks(row | _tried(case.clock))


def _tried(act: Callable[[], Row]) -> Row:
    try:
        return act()
    except FAILURES as failure:
        return {"failed": in_words(failure)}


def unbroken(what: Row, cases: Iterator[Case]) -> Iterator[Case]:
    """These cases; where the code between them fails, one more that says so in the place of those that are lost."""
    try:
        yield from cases
    except FAILURES as failure:
        words = in_words(failure)
        yield Case(what, lambda: {"failed": words})


def of_all_ranks(row: Row) -> Row:
    """With the largest errors of all; failed where it failed on any. Collective."""
    if not together():
        return row
    failed, *errors = largest("failed" in row, *(row.get(name, 0.0) for name in ERRORS))
    if failed:
        told = {name: value for name, value in row.items() if name not in ERRORS}
        return {"failed": "on another rank"} | told
    return row | {name: error for name, error in zip(ERRORS, errors, strict=True) if name in row}


def largest(*numbers: float) -> list[float]:
    """Of those that the ranks say. Collective."""
    said = torch.tensor(numbers, dtype=torch.float64)
    if together():
        dist.all_reduce(said, dist.ReduceOp.MAX)
    return said.tolist()


def together() -> bool:
    """Are there others, who deliver?"""
    return dist.is_initialized() and dist.get_backend() != "fake"


def in_words(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {' '.join(str(failure).split())}"[:WORDS]


def mean_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    """Mean difference, in standard deviations of what is right."""
    assert not out.isnan().any(), "NaN"
    return float((out.double() - exact.double()).abs().mean() / exact.double().std()) if out.numel() else 0.0
