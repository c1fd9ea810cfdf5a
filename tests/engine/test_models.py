"""Whole transformers through attach, at sizes that divide by nothing, against the same transformer alone."""

from __future__ import annotations

from typing import Any

import pytest

from .conftest import Groups

BAR = 1e-5
CASES = "tests.engine.model_cases"
DEGREES = [(2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (1, 4), (2, 2)]
CALLS: dict[str, dict[str, Any]] = {
    "flux": {"kind": "flux"},
    "flux, fewer text tokens than ranks, batch 2": {"kind": "flux", "call": {"text": 1, "batch": 2}},
    "flux, ids with a batch dim": {"kind": "flux", "call": {"ids_batched": True}},
    "flux2": {"kind": "flux2", "call": {"text": 5, "batch": 2}},
    "qwen, mask": {"kind": "qwen", "call": {"masked": 3}},
    "qwen, fewer text tokens than ranks": {"kind": "qwen", "call": {"text": 1, "batch": 2, "masked": 1}},
    "qwen, unequal masks, batch 2": {"kind": "qwen", "call": {"masked": 5, "batch": 2}},
    "qwen, no mask, two timesteps": {"kind": "qwen", "call": {"image": 65}, "model": {"zero_cond_t": True}},
    "wan": {"kind": "wan", "call": {"frames": 2, "batch": 2}},
    "wan, a timestep per token": {"kind": "wan", "call": {"timestep_per_token": True}},
    "wan, image to video": {"kind": "wan", "model": {"image_to_video": True}, "call": {"image_to_video": True}},
    "wan, fewer tokens than ranks": {"kind": "wan", "call": {"height": 1, "width": 2, "timestep_per_token": True}},
    "chronoedit": {"kind": "chrono"},
    "ltx, mask": {"kind": "ltx", "call": {"masked": 3, "batch": 2}},
    "ltx, no mask": {"kind": "ltx"},
    "sd3": {"kind": "sd3", "call": {"batch": 2}},
    "sd3, dual attention": {"kind": "sd3_dual"},
    "sd3, fewer text tokens than ranks": {"kind": "sd3_dual", "call": {"text": 1, "batch": 2}},
    "sd3, fewer image tokens than ranks": {"kind": "sd3_dual", "call": {"height": 1, "width": 2}},
    "lumina2": {"kind": "lumina2"},
    "lumina2, unequal texts, batch 3": {"kind": "lumina2", "call": {"masked": 2, "batch": 3}},
    "lumina2, unequal texts, one key head": {
        "kind": "lumina2",
        "model": {"num_kv_heads": 1},
        "call": {"batch": 2, "text": 11},
    },
    "lumina2, as many key heads as heads": {"kind": "lumina2", "model": {"num_kv_heads": 6}, "call": {"width": 8}},
    "lumina2, fewer tokens than ranks": {"kind": "lumina2", "call": {"text": 1, "height": 1, "width": 2}},
    "hunyuan video 1.5, unequal masks, batch 2": {"kind": "hunyuan15", "call": {"batch": 2, "pictured": True}},
    "hunyuan video 1.5, no picture": {"kind": "hunyuan15", "call": {"masked": 0}},
    "hunyuan video 1.5, a rank's text all masked": {"kind": "hunyuan15", "call": {"text": 23, "masked": 19}},
    "hunyuan video 1.5, fewer image tokens than ranks": {"kind": "hunyuan15", "call": {"height": 1, "width": 2}},
    "ltx2": {"kind": "ltx2"},
    "ltx2, unequal masks, batch 2": {"kind": "ltx2", "call": {"masked": 3, "batch": 2}},
    "ltx2, split rope, unequal masks, batch 2": {
        "kind": "ltx2",
        "model": {"rope_type": "split"},
        "call": {"masked": 3, "batch": 2, "timestep_per_token": True},
    },
    "ltx2, modalities apart": {"kind": "ltx2", "call": {"isolate_modalities": True, "masked": 2}},
    "ltx2, fewer audio tokens than ranks": {"kind": "ltx2", "call": {"audio": 1, "batch": 2}},
    "ltx2, fewer video tokens than ranks": {"kind": "ltx2", "call": {"video": 2, "timestep_per_token": True}},
    "chroma, mask": {"kind": "chroma", "call": {"masked": 2, "batch": 2}},
    "chroma": {"kind": "chroma"},
    "helios": {"kind": "helios", "call": {"batch": 2}},
    "helios, three histories": {"kind": "helios", "call": {"history": True}},
    "helios, histories amplified": {
        "kind": "helios",
        "model": {"is_amplify_history": True},
        "call": {"history": True, "batch": 2},
    },
    "hunyuan video, unequal masks": {"kind": "hunyuan", "call": {"batch": 2}},
    "hunyuan video, a first frame": {
        "kind": "hunyuan",
        "model": {"image_condition_type": "token_replace"},
        "call": {"batch": 1},
    },
    "minimax h3": {"kind": "minimax_h3", "call": {"batch": 2}},
    "minimax h3, one text token": {"kind": "minimax_h3", "call": {"text": 1}},
    "z-image": {"kind": "z_image"},
    "z-image, unequal images and texts": {"kind": "z_image", "call": {"batch": 2, "text": 40}},
    "ltx2.3, one item of a batch perturbed": {
        "kind": "ltx23",
        "call": {"batch": 2, "perturbed": True, "spatio_temporal_guidance_blocks": [0], "timestep_per_token": True},
    },
    "ltx2.3, guided by a perturbed block": {
        "kind": "ltx23",
        "call": {"batch": 2, "masked": 1, "spatio_temporal_guidance_blocks": [1], "use_cross_timestep": True},
    },
}
REPLICAS: dict[str, dict[str, Any]] = {
    "flux": {"kind": "flux", "call": {"batch": 2}, "replicated": ["text"]},
    "flux, fewer text tokens than ranks": {"kind": "flux", "call": {"text": 1}, "replicated": ["text"]},
    "qwen, unequal masks": {"kind": "qwen", "call": {"masked": 5, "batch": 2}, "replicated": ["text"]},
    "hunyuan video 1.5": {"kind": "hunyuan15", "call": {"batch": 2}, "replicated": ["text"]},
    "ltx2": {"kind": "ltx2", "call": {"masked": 3, "batch": 2}, "replicated": ["audio"]},
}
RESIDUALS: dict[str, dict[str, Any]] = {
    "qwen": {"kind": "qwen", "call": {"residuals": 2, "batch": 2}},
    "sd3": {"kind": "sd3", "call": {"residuals": 1, "batch": 2}},
    "z-image": {"kind": "z_image", "call": {"residuals": 96}},
}


@pytest.mark.parametrize("call", RESIDUALS.values(), ids=RESIDUALS)
def test_residuals_of_a_controlnet_are_added_to_the_tokens_of_a_rank(groups: Groups, call: dict[str, Any]) -> None:
    assert max(groups(3).run(f"{CASES}:forward_error", degrees=(3, 1), **call)) <= BAR


@pytest.mark.sweep(one_in=8)
@pytest.mark.parametrize("degrees", DEGREES, ids=str)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_attached_transformer_equals_itself_alone(
    groups: Groups, call: dict[str, Any], degrees: tuple[int, int]
) -> None:
    errors = groups(degrees[0] * degrees[1]).run(f"{CASES}:forward_error", degrees=degrees, **call)
    assert max(errors) <= BAR


@pytest.mark.parametrize("degrees", [(3, 1), (1, 3), (2, 2)], ids=str)
@pytest.mark.parametrize("call", REPLICAS.values(), ids=REPLICAS)
def test_a_transformer_with_a_stream_whole_on_every_rank_equals_itself_alone(
    groups: Groups, call: dict[str, Any], degrees: tuple[int, int]
) -> None:
    errors = groups(degrees[0] * degrees[1]).run(f"{CASES}:forward_error", degrees=degrees, **call)
    assert max(errors) <= BAR


@pytest.mark.parametrize("degrees", [(3, 1), (1, 3), (2, 2)], ids=str)
def test_ranks_hold_the_same_bits_of_a_replicated_stream(groups: Groups, degrees: tuple[int, int]) -> None:
    first, *others = groups(degrees[0] * degrees[1]).run(f"{CASES}:replicated_text", degrees=degrees)
    assert first[0] == 7
    assert all(other == first for other in others)


@pytest.mark.parametrize("kind", ["flux", "qwen", "wan"])
@pytest.mark.parametrize("degrees", [(2, 1, 2), (1, 2, 2)], ids=str)
def test_each_half_of_a_cfg_mesh_is_exact(groups: Groups, kind: str, degrees: tuple[int, int, int]) -> None:
    assert max(groups(4).run(f"{CASES}:forward_error", degrees=degrees, kind=kind)) <= BAR


def test_allgather_is_exact_in_a_model(groups: Groups) -> None:
    options = {"rotate_method": "allgather"}
    call = {"masked": 4, "batch": 2}
    errors = groups(4).run(f"{CASES}:forward_error", degrees=(2, 2), kind="qwen", call=call, options=options)
    assert max(errors) <= BAR


@pytest.mark.parametrize("kind", ["flux", "qwen", "wan", "sd3_dual", "lumina2"])
def test_attaching_again_with_other_degrees_is_exact(groups: Groups, kind: str) -> None:
    all_degrees = [(4, 1), (1, 4), (2, 2), (4, 1)]
    answers = groups(4).run(f"{CASES}:errors_after_attaching_again", kind=kind, all_degrees=all_degrees)
    assert max(error for errors in answers for error in errors) <= BAR


def test_a_mesh_of_the_callers_with_dims_of_its_own_is_taken(groups: Groups) -> None:
    for names in (("fsdp", "ring", "ulysses"), ("ring", "cfg", "ulysses"), ("ring", "ulysses", "data")):
        assert max(groups(4).run(f"{CASES}:error_on_a_mesh_of_the_callers", names=names)) <= BAR


def test_sharded_weights_change_nothing(groups: Groups) -> None:
    answers = groups(2).run(f"{CASES}:errors_with_sharded_weights")
    assert max(error for errors in answers for error in errors) <= BAR


def test_compiled_blocks_are_exact(groups: Groups) -> None:
    assert max(groups(2).run(f"{CASES}:error_when_compiled")) <= BAR


@pytest.mark.parametrize(
    ("kind", "modules"),
    [
        ("flux", ["transformer_blocks.0.attn", "single_transformer_blocks.0.attn"]),
        ("hunyuan15", ["attn"]),
        *(("ltx2", [name]) for name in ("attn1", "audio_attn1", "audio_to_video_attn", "video_to_audio_attn")),
    ],
)
def test_attention_kept_local_in_a_model_is_noticed(groups: Groups, kind: str, modules: list[str]) -> None:
    assert min(groups(2).run(f"{CASES}:error_of_local_attention", kind=kind, modules=modules)) > 1e-2


def test_sizes_may_change_from_one_forward_to_the_next(groups: Groups) -> None:
    answers = groups(3).run(f"{CASES}:errors_of_changing_sizes")
    assert max(error for errors in answers for error in errors) <= BAR


def test_a_forward_that_raises_leaves_nothing_behind(groups: Groups) -> None:
    assert max(groups(2).run(f"{CASES}:error_after_a_forward_that_raised")) <= BAR


@pytest.mark.parametrize("kind", ["sd3_dual", "lumina2"])
def test_processors_that_were_replaced_come_back(groups: Groups, kind: str) -> None:
    groups(2).run(f"{CASES}:processors_come_back", kind=kind)


def test_another_transformer_is_none_of_our_business(groups: Groups) -> None:
    groups(2).run(f"{CASES}:others_are_untouched")
