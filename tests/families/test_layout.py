"""Latents go to tokens and back unchanged, and odd sizes wrap around."""

from __future__ import annotations

import torch

from parallel_runtime.families.layout import grid, pad_to_patch, patchify, tokens_in, unpatchify


def test_packing_is_undone() -> None:
    image, video = torch.randn(2, 3, 4, 6), torch.randn(2, 3, 5, 4, 6)
    assert torch.equal(unpatchify(patchify(image, 2), 2, 4, 6), image)
    assert torch.equal(unpatchify(patchify(video, 2), 2, 4, 6, frames=5), video)


def test_a_token_holds_channels_first_then_the_square() -> None:
    x = torch.arange(2 * 4 * 4.0).reshape(1, 2, 4, 4)
    assert patchify(x, 2)[0, 1].tolist() == [2, 3, 6, 7, 18, 19, 22, 23]


def test_odd_sizes_wrap_around() -> None:
    x = torch.randn(1, 2, 3, 3, 5)
    padded = pad_to_patch(x, 2)
    assert padded.shape == (1, 2, 3, 4, 6)
    assert torch.equal(padded[..., :3, :5], x)
    assert torch.equal(padded[..., 3, :5], x[..., 0, :])
    assert torch.equal(padded[..., :3, 5], x[..., 0])
    assert pad_to_patch(padded, 2) is padded


def test_partial_squares_are_tokens_too() -> None:
    assert tokens_in((1, 16, 15, 21), 2) == 8 * 11
    assert tokens_in((1, 16, 3, 15, 21), 2) == 3 * 8 * 11


def test_positions_are_row_and_column() -> None:
    assert grid(2, 3, 3, torch.device("cpu")).tolist()[4] == [0, 1, 1]
