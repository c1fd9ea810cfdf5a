"""Random attention problems and their answer, computed in float64 in one process."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

HEADS = (1, 3, 5, 12, 24)


@dataclass(frozen=True)
class Problem:
    """Queries, keys, values [B, text + image, H, D] and a key-padding mask, True: attend. Key heads may be fewer.

    The mask is [B, text + image], or [B, text + image, H] where heads see different keys.
    """

    text: int
    image: int
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None

    @property
    def lengths(self) -> dict[str, int]:
        return {"text": self.text, "image": self.image}


def random_problem(
    seed: int, *, masked: bool | None = None, grouped: bool = False, head_dims: tuple[int, ...] = (8, 16)
) -> Problem:
    """Masks hide random keys, random keys per head, unequal tails of the text, or all text and a run of the image."""
    choose = random.Random(seed)
    text, image = choose.randint(1, 70), choose.choice([choose.randint(1, 6), choose.randint(7, 300)])
    shape = (choose.choice((1, 2)), text + image, choose.choice(HEADS), choose.choice(head_dims))
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(shape, generator=generator) for _ in range(3))
    use_mask = choose.random() < 0.6 if masked is None else masked
    mask = _random_mask(choose, generator, shape[:3], text, image) if use_mask else None
    heads = shape[2]
    kept = choose.choice([n for n in range(1, heads + 1) if heads % n == 0]) if grouped else heads
    return Problem(text, image, 3 * query, key[:, :, :kept], value[:, :, :kept], mask)


def attention(problem: Problem) -> Tensor:
    """[B, text + image, H, D] float64; queries without any key get zero."""
    group = problem.query.shape[2] // problem.key.shape[2]
    q, k, v = (tensor.double().transpose(1, 2) for tensor in (problem.query, problem.key, problem.value))
    k, v = (tensor.repeat_interleave(group, dim=1) for tensor in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if problem.mask is not None:
        by_head = problem.mask.reshape(*problem.mask.shape[:2], -1).permute(0, 2, 1)
        scores = scores.masked_fill(~by_head[:, :, None, :], -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2)


def _random_mask(
    choose: random.Random, generator: torch.Generator, shape: tuple[int, ...], text: int, image: int
) -> Tensor:
    kind = choose.choice(("random", "heads", "tails", "runs"))
    mask = torch.ones(shape[:2], dtype=torch.bool)
    if kind == "heads":
        mask = torch.rand(shape, generator=generator) < 0.4
        mask[:, choose.randint(0, text + image - 1)] = True
        return mask
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
