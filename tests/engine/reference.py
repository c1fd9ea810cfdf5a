"""Random attention problems and their answer, computed in float64 in one process."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

HEADS = (1, 3, 5, 12, 24)


@dataclass(frozen=True)
class Problem:
    """Queries, keys, values [B, text + image, H, D] and a key-padding mask [B, text + image], True: attend."""

    text: int
    image: int
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None

    @property
    def lengths(self) -> dict[str, int]:
        return {"text": self.text, "image": self.image}


def random_problem(seed: int, *, masked: bool | None = None) -> Problem:
    """A third of the masks hide random keys, a third hide unequal tails of the text, a third all text and a run."""
    choose = random.Random(seed)
    text, image = choose.randint(1, 70), choose.choice([choose.randint(1, 6), choose.randint(7, 300)])
    shape = (choose.choice((1, 2)), text + image, choose.choice(HEADS), choose.choice((8, 16)))
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(shape, generator=generator) for _ in range(3))
    use_mask = choose.random() < 0.6 if masked is None else masked
    mask = _random_mask(choose, generator, shape[0], text, image) if use_mask else None
    return Problem(text, image, 3 * query, key, value, mask)


def attention(problem: Problem) -> Tensor:
    """[B, text + image, H, D] float64; queries without any key get zero."""
    q, k, v = (tensor.double().transpose(1, 2) for tensor in (problem.query, problem.key, problem.value))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if problem.mask is not None:
        scores = scores.masked_fill(~problem.mask[:, None, None, :], -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2)


def _random_mask(choose: random.Random, generator: torch.Generator, batch: int, text: int, image: int) -> Tensor:
    mask = torch.ones(batch, text + image, dtype=torch.bool)
    kind = choose.choice(("random", "tails", "runs"))
    for row in mask:
        if kind == "random":
            row.copy_(torch.rand(text + image, generator=generator) < 0.4)
        elif kind == "tails":
            row[choose.randint(0, text - 1) : text] = False
        else:
            row[:text] = False
            start = choose.randint(0, image - 1)
            row[text + start : text + choose.randint(start, image)] = False
        row[choose.randint(0, text + image - 1)] = True
    return mask
