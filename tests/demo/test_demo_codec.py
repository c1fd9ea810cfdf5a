"""The demo's codec and judge: pictures survive the round trip, and the judge cannot be talked into anything."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from parallel_runtime.demo import words_and_pictures

from ..demo_training.draw import COLOURS, SHAPES, Picture, draw
from ..demo_training.fitting import encode
from ..demo_training.judge import judge
from ..demo_training.subjects import any_picture, any_wording


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads do not pay for pictures so small, least of all on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


STAR = Picture(shape="star", colour="red", background="white", x=0.1, y=-0.1, radius=0.3)


def test_a_round_trip_keeps_the_picture() -> None:
    for shape in SHAPES:
        image = draw(replace(STAR, shape=shape), 128, 192)
        again = words_and_pictures.decode(encode(image[None]))[0].permute(2, 0, 1)
        assert -10 * math.log10((again - image).square().mean()) > 25


def test_latents_have_unit_variance_after_fluxs_own_scaling() -> None:
    rng = random.Random(1)
    images = [draw(any_picture(rng, any_wording(rng), 128, 128)[0], 128, 128) for _ in range(200)]
    latents = (encode(torch.stack(images)) - 0.1159) * 0.3611
    assert latents.shape == (200, 16, 16, 16)
    assert latents.var().item() == pytest.approx(1, abs=0.15)


def test_sides_must_be_multiples_of_eight() -> None:
    with pytest.raises(ValueError, match="multiples of 8"):
        encode(torch.zeros(1, 3, 100, 128))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_judge_knows_every_shape_and_no_other(shape: str) -> None:
    rng = random.Random(shape)
    for _ in range(4):
        colour, background = rng.sample(list(COLOURS), 2)
        picture = replace(STAR, shape=shape, colour=colour, background=background, radius=rng.uniform(0.2, 0.4))
        seen = judge(draw(picture, 128, 128).permute(1, 2, 0))
        assert (seen.shape, seen.colour, seen.background) == (shape, colour, background)


def test_the_judge_does_not_take_one_shape_or_colour_for_another() -> None:
    seen = judge(draw(replace(STAR, shape="heart", colour="pink"), 128, 128).permute(1, 2, 0))
    assert seen.shape != "star"
    assert seen.colour != "red"


def test_the_judge_sees_nothing_in_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        assert judge(torch.rand(128, 128, 3, generator=generator)).shape == ""
        static = torch.randn(1, 16, 16, 16, generator=generator)
        assert (
            judge(words_and_pictures.decode(static / words_and_pictures.SCALE + words_and_pictures.SHIFT)[0]).shape
            == ""
        )


def test_the_judge_sees_nothing_on_an_empty_canvas() -> None:
    assert judge(torch.full((128, 128, 3), 0.98)).shape == ""


def test_the_judge_rejects_half_a_shape() -> None:
    image = draw(replace(STAR, shape="circle", x=0.0), 128, 128).permute(1, 2, 0)
    image[:, 64:] = 0.98
    assert judge(image).shape == ""
