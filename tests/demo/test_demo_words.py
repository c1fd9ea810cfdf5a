"""The demo's prompts: plain words in, orthogonal embeddings out, and a clear refusal of the rest."""

from __future__ import annotations

import random

import pytest
import torch

from parallel_runtime.demo.words_and_pictures import (
    COLOURS,
    LONGEST,
    REGISTERS,
    SHAPES,
    WIDTH,
    encode,
    parse,
    vocabulary,
)

from ..demo_training import draw
from ..demo_training.subjects import any_picture, any_wording


def test_a_prompt_has_one_token_a_word_one_to_start_and_the_registers() -> None:
    cross, pooled = encode("a red circle")
    assert cross.shape == (1, REGISTERS + 4, WIDTH)
    assert pooled.shape == (1, WIDTH)


def test_an_empty_prompt_is_valid_and_says_nothing() -> None:
    cross, pooled = encode("")
    assert cross.shape == (1, REGISTERS + 1, WIDTH)
    assert not pooled.any()


def test_the_same_prompt_always_gives_the_same_tensors() -> None:
    assert all(torch.equal(a, b) for a, b in zip(encode("a small star"), encode("a small star"), strict=True))


def test_word_order_shows_in_the_tokens_but_not_in_the_pooled_vector() -> None:
    one, other = encode("red circle"), encode("circle red")
    assert not torch.equal(one[0], other[0])
    assert torch.equal(one[1], other[1])


@pytest.mark.parametrize(
    ("prompt", "names"),
    [
        ("A red Circle.", ["a", "red", "circle"]),
        ("big plus in the middle", ["large", "cross", "in", "a", "center"]),
        ("blue square on a yellow background", ["blue", "square", "on", "a", "yellow background", "background"]),
        ("blue square on yellow", ["blue", "square", "on", "yellow background"]),
        ("on a yellow background, a blue square",
         ["on", "a", "yellow background", "background", "a", "blue", "square"]),
        ("a star on the left", ["a", "star", "on", "a", "left"]),
    ],
)  # fmt: skip
def test_prompts_are_read_as_people_mean_them(prompt: str, names: list[str]) -> None:
    assert parse(prompt) == names


def test_an_unknown_word_is_refused_by_name_with_the_vocabulary() -> None:
    with pytest.raises(ValueError, match="does not know the word 'zebra'") as refusal:
        encode("a red zebra")
    assert all(word in str(refusal.value) for word in vocabulary())


def test_a_second_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="more than one shape"):
        encode("a red circle a blue square")


def test_a_prompt_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        encode("a " * LONGEST)


def test_there_is_a_word_for_all_that_was_drawn_in_its_order() -> None:
    assert (tuple(draw.COLOURS), tuple(draw.SHAPES)) == (COLOURS, SHAPES)


def test_every_prompt_it_was_trained_on_can_be_read_back() -> None:
    rng = random.Random(3)
    for _ in range(500):
        wording = any_wording(rng)
        picture, prompt = any_picture(rng, wording, 128, 128)
        names = parse(prompt)
        assert (picture.shape in names) == wording.shape
        assert (picture.colour in names) == wording.colour
        assert (f"{picture.background} background" in names) == bool(wording.background)
