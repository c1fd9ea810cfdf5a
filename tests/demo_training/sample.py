"""The demo model's bare sampler: Euler steps down evenly spaced noise levels, for its training and its tests.

Knows prompts and the codec. The model is whatever answers an evaluation; the product's own samplers are elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from parallel_runtime.demo import words_and_pictures
from parallel_runtime.demo.words_and_pictures import conditions

Evaluate = Callable[[Tensor, Tensor, dict[str, Any]], Tensor]


@torch.no_grad()
def euler(evaluate: Evaluate, prompt: str, noise: Tensor, *, steps: int = 10, cfg: float = 1.0) -> Tensor:
    """A picture [1, H, W, 3] from noise [1, 16, H/8, W/8]."""
    conditional, unconditional = conditions(prompt), conditions("")
    x, sigmas = noise, torch.linspace(1, 0, steps + 1)
    for now, then in pairwise(sigmas):
        velocity = evaluate(x, now[None], conditional)
        if cfg != 1:
            blind = evaluate(x, now[None], unconditional)
            velocity = blind + cfg * (velocity - blind)
        x = x + (then - now) * velocity
    return words_and_pictures.decode(x / words_and_pictures.SCALE + words_and_pictures.SHIFT)
