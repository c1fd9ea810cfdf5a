"""What cannot be exact is refused before the first step, on every rank, with what was found and the way out."""

from __future__ import annotations

import re

import pytest

from .conftest import Groups

REFUSALS = {
    "attaching_twice": "is attached already; detach it first",
    "detaching_what_is_not_attached": "is not attached",
    "unequal_lengths_of_a_stream": r"\(img_ids\) has 60 tokens, but image has 63",
    "streams_that_no_plan_cuts": "the plan splits no stream text that could be replicated; it splits video",
    "processors_set_after_attach": r"processor of transformer_blocks.1.attn, or its backend, was changed after attach",
    "backend_set_after_attach": r"processor of transformer_blocks.0.attn, or its backend, was changed after attach",
    "caches_that_compare_tokens": r"FBCHeadBlockHook\) compares hidden states, .*call disable_cache\(\)",
    "caches_that_compare_tokens_after_attach": r"FBCHeadBlockHook\) compares hidden states, .*call disable_cache\(\)",
    "caches_that_measure_tokens": r"MagCacheHeadHook\) compares hidden states",
    "processors_that_are_not_aware": r"FusedJointAttnProcessor2_0 \(transformer_blocks.0.attn\) is not context-",
    "processors_that_are_half_aware": r"FluxIPAdapterAttnProcessor .* set FluxAttnProcessor .* instead",
    "a_class_without_a_plan": "no context-parallel plan is known for _Unknown .*pass plan=",
    "a_plan_for_missing_modules": "the plan names 'blocks', which FluxTransformer2DModel does not have",
    "a_plan_for_missing_arguments": "names argument 'latents' .*takes hidden_states, encoder_hidden_states",
    "masks_between_video_tokens": r"transformer_blocks \(.*\) gets self_attention_mask, which its plan does not",
    "masks_between_some_tokens": "a mask of 5 x 5 pairs of tokens was made from a part",
    "masks_of_another_length": "covers 3 keys, but this rank has",
    "degrees_that_are_not_the_groups": "makes 4 ranks, but the group has 2",
    "degrees_that_are_not_the_meshs": "ring_degree is 2, but the mesh has 1 ranks along 'ring'",
    "degrees_that_are_not_our_meshs": "ring_degree is 2, but the mesh has 1 ranks along 'ring'",
    "meshes_without_a_ring": 'needs a "ring" dim',
    "backends_that_need_a_gpu": "needs a GPU",
    "training": r"wrap the call in torch.no_grad\(\)",
}


@pytest.mark.parametrize(("case", "expected"), REFUSALS.items(), ids=REFUSALS)
def test_refused(groups: Groups, case: str, expected: str) -> None:
    for text in groups(2).run(f"tests.engine.refusals:{case}"):
        assert re.search(expected, text), text
