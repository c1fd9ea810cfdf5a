"""ComfyUI's patches and replaced blocks see whole tokens, and other attention than ours is honoured or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest

from parallel_runtime.architectures.block_patches import attends_each_head, attention_called_by

from ..engine.conftest import Groups

EXACT = 1e-5
DEGREES = [(2, 1), (3, 1), (1, 2), (2, 2)]
PATCHED = [
    ("wan", "double_block"),
    ("qwen image edit", "double_block"),
    ("z-image", "double_block"),
    ("z-image references", "noise_refiner"),
    ("wan vace", "double_block"),
]
REPLACED: list[tuple[str, list[list[Any]]]] = [
    ("flux", [["double_block", 0], ["single_block", 1]]),
    ("flux", [["double_block", 1], ["single_block", 0]]),
    ("flux residuals", [["double_block", 1], ["single_block", 1]]),
    ("flux 2 references at time zero", [["double_block", 0], ["single_block", 1]]),
    ("wan", [["double_block", 1]]),
    ("wan vace", [["double_block", 0], ["double_block", 3]]),
    ("qwen image", [["double_block", 0]]),
    ("qwen image edit 2511", [["double_block", 1]]),
    ("sd3.5 medium", [["double_block", 1]]),
    ("hunyuan video", [["double_block", 1], ["single_block", 1]]),
    ("hunyuan video i2v", [["single_block", 0], ["single_block", 1]]),
    ("chroma", [["double_block", 18], ["single_block", 37]]),
    ("ltx-video", [["double_block", 1]]),
    ("joyimage references", [["double_block", 1]]),
    ("lens", [["double_block", 0]]),
]
DOUBLE = [["double_block", 0], ["double_block", 1]]
STACKS: list[tuple[str, list[list[Any]]]] = [
    ("flux", DOUBLE),
    ("flux residuals", DOUBLE),
    ("flux 2 references at time zero", DOUBLE),
    ("flux 2 references at time zero", [*DOUBLE, ["single_block", 0]]),
    ("hunyuan video i2v", DOUBLE),
    ("flux", [*DOUBLE, ["single_block", 0], ["single_block", 1]]),
    ("wan", DOUBLE),
]


def _run(networks: Groups, ring: int, ulysses: int, function: str, **arguments: Any) -> list[Any]:
    where = f"tests.architectures.between_cases:{function}"
    return networks(ring * ulysses).run(where, ring=ring, ulysses=ulysses, **arguments)


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize(("ring", "ulysses"), DEGREES)
@pytest.mark.parametrize(("name", "kind"), PATCHED)
def test_a_patch_between_blocks_sees_all_tokens(
    networks: Groups, name: str, kind: str, ring: int, ulysses: int
) -> None:
    assert max(_run(networks, ring, ulysses, "patched", name=name, kind=kind)) <= EXACT


@pytest.mark.sweep(one_in=6)
@pytest.mark.parametrize(("ring", "ulysses"), DEGREES)
@pytest.mark.parametrize("how", ["leaving out", "mixing"])
@pytest.mark.parametrize(("name", "blocks"), REPLACED)
def test_replaced_blocks_see_all_tokens(
    networks: Groups, name: str, blocks: list[list[Any]], how: str, ring: int, ulysses: int
) -> None:
    assert max(_run(networks, ring, ulysses, "replaced", name=name, how=how, blocks=blocks)) <= EXACT


@pytest.mark.parametrize(("name", "blocks"), STACKS)
def test_all_blocks_of_a_stack_may_be_left_out(networks: Groups, name: str, blocks: list[list[Any]]) -> None:
    assert max(_run(networks, 2, 1, "replaced", name=name, how="leaving out", blocks=blocks)) <= EXACT


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
@pytest.mark.parametrize(("name", "kind"), [("flux", "attn1_patch"), ("wan", "double_block")])
def test_a_patch_that_says_that_it_computes_each_token_by_itself_gets_a_ranks_tokens(
    networks: Groups, name: str, kind: str, ring: int, ulysses: int
) -> None:
    for answer in _run(networks, ring, ulysses, "each_token", name=name, kind=kind):
        assert answer["error"] <= EXACT
        assert answer["tokens"][0] < answer["tokens"][1]


@pytest.mark.parametrize("kind", ["attn1_patch", "attn1_output_patch", "attn2_patch", "mlp_patch", "someone's"])
def test_a_patch_inside_blocks_is_refused_by_name(networks: Groups, kind: str) -> None:
    answers = networks(2).run("tests.architectures.between_cases:refused", name="flux", kind=kind)
    owner = "" if kind == "someone's" else " of mixing"
    assert all(f"{kind}{owner} would run inside blocks" in message and "degrees to 1" in message for message in answers)


@pytest.mark.parametrize("name", ["wan i2v", "qwen image mask", "flux redux"])
def test_another_nodes_attention_runs_on_whole_keys(networks: Groups, name: str) -> None:
    for answer in _run(networks, 1, 2, "overridden", name=name):
        assert answer["error"] <= EXACT
        assert answer["calls"][0] >= answer["calls"][1]  # heads go in waves, each a call


def test_another_nodes_attention_is_refused_in_a_ring(networks: Groups) -> None:
    for answer in _run(networks, 2, 1, "overridden", name="wan"):
        assert "gives no log-sum-exp" in answer["refused"]
        assert "ring_degree is 2; set it to 1" in answer["refused"]


def test_another_nodes_attention_is_refused_by_heads_if_it_does_not_say_that_it_computes_each_by_itself(
    networks: Groups,
) -> None:
    for answer in _run(networks, 1, 2, "overridden", name="wan", says_so=False):
        assert "does not say that it computes each head by itself" in answer["refused"]


def test_names_in_comfyuis_modules_are_given_back_after_the_last_network(networks: Groups) -> None:
    for answer in networks(2).run("tests.architectures.between_cases:names_restored"):
        assert answer["wrapped"]
        assert answer["restored"]
        assert max(answer["errors"]) <= EXACT


def test_a_forward_that_fails_leaves_nothing_behind(networks: Groups) -> None:
    for answer in networks(2).run("tests.architectures.between_cases:after_an_exception"):
        assert answer["said"] == "out of memory, say"
        assert answer["error"] <= EXACT


def test_a_network_is_divided_once(networks: Groups) -> None:
    assert all("parallel already" in message for message in networks(2).run("tests.architectures.between_cases:twice"))


@pytest.mark.parametrize(("ring", "ulysses"), DEGREES[:3])
def test_a_chosen_backend_computes_the_same(networks: Groups, ring: int, ulysses: int) -> None:
    assert max(_run(networks, ring, ulysses, "chosen_backend", name="flux redux")) <= EXACT


def test_a_mask_of_some_pairs_is_refused(networks: Groups) -> None:
    answers = networks(2).run("tests.architectures.between_cases:foreign_masks")
    assert all("50 x 50 pairs of tokens" in message for message in answers)


def test_an_attention_that_the_file_chose_for_a_block_computes_its_heads(networks: Groups) -> None:
    for answer in networks(2).run("tests.architectures.between_cases:own_attention", chosen=True):
        assert answer["error"] <= EXACT
        assert answer["calls"] == [1, 1], "once natively, once on this rank's heads"


def test_a_ring_refuses_an_attention_that_the_file_chose_by_name(networks: Groups) -> None:
    for answer in networks(2).run("tests.architectures.between_cases:own_attention", chosen=True, ring=2):
        assert "attention_int8 gives no log-sum-exp" in answer["refused"]
        assert "ring_degree is 2; set it to 1" in answer["refused"]


@pytest.mark.parametrize(
    "case",
    [{"chosen": False}, {"chosen": True, "overridden": True}, {"chosen": True, "backend": "native"}],
    ids=["none chosen", "under another node's", "under a chosen backend"],
)
def test_an_attention_that_comfyui_would_not_use_either_is_none(networks: Groups, case: dict[str, Any]) -> None:
    for answer in networks(2).run("tests.architectures.between_cases:own_attention", **case):
        assert answer["error"] <= EXACT


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2)])
def test_pytorchs_attention_chosen_by_a_node_is_a_rings_own(networks: Groups, ring: int, ulysses: int) -> None:
    call = {"function": "attention_pytorch", "ring": ring, "ulysses": ulysses}
    for answer in networks(2).run("tests.architectures.between_cases:chosen_by_a_node", **call):
        assert answer["error"] <= 1e-5


def test_an_attention_without_log_sum_exp_that_a_node_chose_is_refused_a_ring(networks: Groups) -> None:
    call = {"function": "attention_sub_quad", "ring": 2, "ulysses": 1}
    for answer in networks(2).run("tests.architectures.between_cases:chosen_by_a_node", **call):
        assert "gives no log-sum-exp" in answer["refused"]


def get_sage_func(mode: str) -> Callable[..., Any]:
    """Makes an attention under the names that KJNodes has."""

    def sageattn(*_: Any) -> None: ...

    def sageattn_qk_int8_pv_fp16_cuda(*_: Any) -> None: ...

    if mode == "auto":

        def sage_func(*args: Any) -> Any:
            return sageattn(*args)
    else:

        def sage_func(*args: Any) -> Any:
            return sageattn_qk_int8_pv_fp16_cuda(*args)

    own = sage_func
    sage_func = wraps(own)(lambda *args: own(*args))  # as torch.compiler.disable does

    def attention_sage(*args: Any) -> Any:
        return sage_func(*args)

    return wraps(attention_sage)(lambda *args: attention_sage(*args))


@pytest.mark.parametrize(("mode", "called"), [("auto", "attention_sage"), ("sageattn_qk_int8_pv_fp16_cuda", "")])
def test_a_ring_has_kjnodes_sage_where_sageattention_chooses_its_kernel(mode: str, called: str) -> None:
    new_attention = get_sage_func(mode)

    def override(func: Any, *args: Any, **kwargs: Any) -> Any:
        return new_attention.__wrapped__(*args, **kwargs)

    assert attends_each_head(override)
    assert attention_called_by(override) == called


def test_of_another_override_nothing_is_known() -> None:
    assert attention_called_by(lambda func, *args, **kwargs: func(*args, **kwargs)) == ""
