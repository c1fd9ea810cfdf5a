"""Layers behind the last blocks run on each rank's own tokens, so that ranks gather what the picture needs alone."""

from __future__ import annotations

import pytest

from parallel_runtime.architectures import ARCHITECTURES
from parallel_runtime.architectures.row_plan import RowPlan

from ..engine.conftest import Groups

EXACT = 1e-5
AFTER = {
    "ACE-Step": "ace-step",
    "AuraFlow": "aura flow",
    "Boogu": "boogu references",
    "Chroma": "chroma",
    "CogVideoX": "cogvideox",
    "Cosmos Predict2": "cosmos predict2, a time for each frame",
    "ERNIE-Image": "ernie image",
    "FLUX": "flux 2 references at time zero",
    "HiDream I1": "hidream i1",
    "HuMo": "humo",
    "Hunyuan 3D 2": "hunyuan 3d",
    "Hunyuan DiT": "hunyuan dit",
    "Ideogram 4": "ideogram 4, padded",
    "Krea 2": "krea 2 references at time zero",
    "Lens": "lens",
    "Lumina 2 or Z-Image": "z-image references",
    "Mage-Flow": "mage-flow references",
    "MiniMax H3": "minimax h3 masks",
    "Mochi": "mochi",
    "OmniGen 2": "omnigen 2 references",
    "PixArt": "pixart",
    "Qwen-Image": "qwen image edit 2511",
    "Stable Diffusion 3": "sd3.5 medium",
    "Wan": "wan i2v",
    "Wan Animate": "wan animate",
    "Wan S2V": "wan s2v with motion",
    "Wan VACE": "wan vace",
    "WanDancer": "wandancer",
}
BEFORE = {  # these gather all that their last layers are given
    "ACE-Step 1.5": "its last layer makes several moments of a token",
    "Chroma Radiance": "pixels are decoded by rows of the batch, of all patches",
    "Cosmos 1": "between its blocks all tokens are needed",
    "HiDream O1": "the network slices the picture out of its tokens by whole positions",
    "Hunyuan 3D 2.1": "its last layer drops the first of all tokens",
    "HunyuanVideo": "the network slices text and references off by whole positions",
    "JoyImage": "the network slices references off by whole positions",
    "Kandinsky 5": "the network reshapes its tokens to frames, rows and columns",
    "LTX-2": "the network modulates all tokens between its last norm and its projection",
    "LTX-Video": "the network modulates all tokens between its last norm and its projection",
    "MiniMax Music 3": "the network goes from window to window by whole positions",
    "PiD": "blocks of pixels are given all patches",
    "PixelDiT": "blocks of pixels are given all patches",
    "Qwen-Image 2.1": "the network slices the image out of its tokens by whole positions",
    "SenseNova U1.5": "its layers gather by themselves: what follows them was not read",
    "Stable Audio": "the network slices what stands for the whole off by whole positions",
    "TripoSplat": "the network slices points and camera out by whole positions",
    "Z-Image in pixels": "pixels are decoded by rows of the batch, of all patches",
}
# Its small network has 96 hidden numbers a token and gives 128; the model's have 2,560.
NARROW = {"ACE-Step"}


def test_each_architecture_gathers_after_its_last_layers_or_says_why_not() -> None:
    split = [each for each in ARCHITECTURES if not isinstance(each.plan, RowPlan)]
    after = {each.name for each in split if any(plan.tail for plan in each.plan.module_plans)}
    assert after == AFTER.keys()
    assert {each.name for each in split} - after == BEFORE.keys()


@pytest.mark.sweep(one_in=6)
@pytest.mark.parametrize("name", list(AFTER))
def test_fewer_bytes_are_gathered_for_the_same_picture(networks: Groups, name: str) -> None:
    for answer in networks(3).run("tests.architectures.cases:gathered_bytes", name=AFTER[name]):
        assert answer["error before"] <= EXACT
        assert answer["error after"] <= EXACT
        assert (answer["after"] < answer["before"]) != (name in NARROW)


def test_minimax_h3_gathers_numbers_of_video_and_sound_not_of_hidden_states(networks: Groups) -> None:
    for answer in networks(2).run("tests.architectures.cases:gathered_bytes", name="minimax h3"):
        assert answer["after"] < answer["before"] / 1.5


@pytest.mark.parametrize("name", ["wan", "flux", "qwen image", "cosmos predict2"])
@pytest.mark.parametrize("option", ["all blocks left out", "a patch that sees all tokens"])
def test_last_layers_are_given_all_tokens_where_no_block_has_split_them(
    networks: Groups, name: str, option: str
) -> None:
    for answer in networks(2).run("tests.architectures.cases:gathered_bytes", name=name, option=option):
        assert answer["error after"] <= EXACT
