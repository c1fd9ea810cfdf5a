"""Which jobs the parity test samples, on which degrees: a seeded deal of variations, in which every family meets every
variation once, of which the test takes a part; with CP_TEST_SWEEP=1 every family meets all of them on all degrees."""

from __future__ import annotations

import os
import random

import pytest

from .graphs import TEXTS, Job, Parallel

FAMILIES = tuple(TEXTS)

DEGREES: dict[str, Parallel] = {
    "1_worker": Parallel(ring_degree=1, ulysses_degree=1),
    "ring_2": Parallel(ring_degree=2, ulysses_degree=1),
    "ulysses_2": Parallel(ring_degree=1, ulysses_degree=2),
    "ring_3": Parallel(ring_degree=3, ulysses_degree=1),
    "ring_2_x_ulysses_2": Parallel(ring_degree=2, ulysses_degree=2),
    "pipeline_2": Parallel(pipeline_degree=2),
}

# Another number of workers is another group, which takes a while to start: most modules do with two.
ALONE = pytest.param("1_worker", marks=pytest.mark.sweep)
FOUR = pytest.param("ring_2_x_ulysses_2", marks=pytest.mark.sweep)

# Not heun with normal on Flux: it divides by a sigma of 3e-4, so rounding alone moves the latent by 1e-4 x std.
VARIATIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "guided": {"cfg": 3.5, "sampler": "dpmpp_2m", "scheduler": "beta"},
    "image_to_image": {"denoise": 0.6, "latent_seed": 3, "cfg": 2.0, "scheduler": "sgm_uniform"},
    "batch_of_two": {"batch": 2, "cfg": 2.0, "sampler": "heun"},
    "odd_size": {"size": (17, 23), "scheduler": "kl_optimal"},
    "odd_size_guided": {"size": (9, 31), "cfg": 4.0, "batch": 2, "sampler": "res_multistep"},
    "short_prompts": {"prompt_tokens": (7, 7), "cfg": 3.0, "sampler": "euler_cfg_pp"},
    "unequal_prompts": {"prompt_tokens": (7, 63), "cfg": 3.0, "sampler": "lcm"},
    "one_token": {"prompt_tokens": (1, 2), "cfg": 2.0, "scheduler": "ddim_uniform"},
    "inpainting": {"masked": 1, "latent_seed": 3, "denoise": 0.7, "cfg": 2.0},
    "two_prompts_one_area": {"second_prompt": True, "cfg": 2.0, "prompt_tokens": (20, 33)},
    "sde": {"sampler": "dpmpp_2m_sde", "cfg": 2.0, "seed": 2**64 - 1},
    "ancestral": {"sampler": "euler_ancestral", "scheduler": "normal", "steps": 5},
    "uni_pc": {"sampler": "uni_pc", "cfg": 2.0, "scheduler": "karras"},
    "masked_text": {"text_mask_valid": 11, "cfg": 2.0, "prompt_tokens": (20, 9)},
}


def job(family: str, variation: str) -> Job:
    return Job(family=family, **VARIATIONS[variation])  # type: ignore[arg-type]


def parity_cases() -> list[tuple[str, str, str]]:
    """(degrees, family, variation), ordered so that one worker group serves as many cases as possible."""
    dealt = [(degrees, *case) for family in FAMILIES for degrees, case in _deal(family)]
    return sorted(dealt, key=lambda case: list(DEGREES).index(case[0]))


def _deal(family: str) -> list[tuple[str, tuple[str, str]]]:
    if os.environ.get("CP_TEST_SWEEP"):
        return [(degrees, (family, variation)) for degrees in DEGREES for variation in VARIATIONS]
    deck = list(VARIATIONS)
    random.Random(family).shuffle(deck)
    return [(list(DEGREES)[i % len(DEGREES)], (family, variation)) for i, variation in enumerate(deck)]
