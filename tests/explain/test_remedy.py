"""The nearest CP Parallel Config that works, told as widgets to set."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from parallel_runtime.errors import Refused, Sentence
from parallel_runtime.group.machines import checked_plan
from parallel_runtime.planning.network_stats import Load, NetworkStats
from parallel_runtime.planning.request_checks import (
    Change,
    changes,
    changes_to,
    check_run_in_patches,
    in_words,
    instead,
    refusal,
)
from parallel_runtime.planning.run_plan import PlanInputs
from parallel_runtime.request import ParallelRequest, widgets
from tests.test_refusal_words import calls, codes_of

FLUX = NetworkStats(heads=24)
UNDIVIDED = NetworkStats(name="SeedVR2", divisible=False)
BY_ULYSSES = NetworkStats(name="FLUX", heads=24, no_lse="--use-split-cross-attention")
IN_STAGES = NetworkStats(name="FLUX", heads=24, step_cacheable=True, loads=(Load(1, 1),) * 8)
MACHINES = {"nnodes": 2, "rdzv_endpoint": "127.0.0.1:29500"}
RIGHT: tuple[dict[str, Any], ...] = (
    {},
    {"data_degree": 1, "convert_to_fp32": False, "rotate_method": "allgather", "compile": "on", "step_cache": 0.1},
    {"data_degree": 1, "cfg_degree": 1, "weights": "offload", "after_sampling": "unload", "dtype": "float32"},
    {"devices": "0,1", "cfg_degree": 2, "shares": "equal"},
    {"devices": "0,1", "ring_degree": 2, "ulysses_degree": 1, "shares": "3,2", "step_cache": 0.1},
    {"ring_degree": 1, "ulysses_degree": 2, "data_degree": 2, "weights": "shard"},
    {"pipeline_degree": 2, "patches": 4, "warmup_steps": 3, "data_degree": 1, "cfg_degree": 1},
    {"devices": "cpu,cpu", "ring_degree": 2, "data_degree": 1, "shares": "3,2"},
)
WRONG: dict[str, tuple[Any, ...]] = {
    "devices": ("gpu7", "9", "0,9", "0,cpu", "0", ",".join("0" * 65)),
    "ring_degree": (3, 8, 64),
    "ulysses_degree": (3, 8, 64),
    "cfg_degree": (2,),
    "data_degree": (3, 8, 64),
    "pipeline_degree": (1, 2, 3, 64),
    "patches": (2, 4),
    "shares": ("3", "3,2,1,1,1,1,1", "0,0", "1;2", "3,2"),
    "weights": ("shard",),
    "step_cache": (0.2,),
    "attention_backend": ("sage", "_native_cudnn"),
    "cuda_graphs": ("on",),
    "nnodes": (2,),
}


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CP_CLUSTER_TOKEN", raising=False)
    monkeypatch.delenv("CP_CLUSTER_TOKEN_FILE", raising=False)


def checking(gpus: int, network: NetworkStats = FLUX, **inputs: Any) -> Callable[[ParallelRequest], object]:
    return lambda request: checked_plan(PlanInputs(request=request, network=network, gpus=gpus, **inputs))


def mended(check: Callable[[ParallelRequest], object], **asked: Any) -> tuple[tuple[Change, ...], Refused]:
    """What the button changes in `asked`, and the refusal that stands above it."""
    request = ParallelRequest.of(asked)
    refused = refusal(check, request)
    assert refused is not None, asked
    nearest, wrong = instead(check, request, refused)
    assert refusal(check, nearest) is None, nearest
    return changes(request, nearest), wrong


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"ring_degree": 3, "ulysses_degree": 1}, "ring_degree 2"),
        ({"ring_degree": 1, "ulysses_degree": 1, "devices": "0,1"}, "ulysses_degree on auto"),
        ({"devices": "9"}, "devices on auto"),
        ({"step_cache": 0.5, "devices": "9"}, "devices on auto"),
        ({"cuda_graphs": "on", "devices": "cpu,cpu"}, "cuda_graphs auto"),
        ({"patches": 4, "warmup_steps": 3}, "patches 1"),
        ({"pipeline_degree": 2, "shares": "3,2", "data_degree": 1}, "shares equal"),
        ({"shares": "3,2", "cfg_degree": 2, "data_degree": 1}, "cfg_degree 1"),
        ({"nnodes": 2, "data_degree": 1}, "nnodes 1"),
    ],
)
def test_the_nearest_that_works_is_told_in_words(asked: dict[str, Any], says: str) -> None:
    changed, _ = mended(checking(2, guided=True), **asked)
    assert in_words(changed) == says


@pytest.mark.parametrize("gpus", [0, 1, 2, 4])
def test_one_typing_error_resets_no_widget_that_was_right(gpus: int) -> None:
    """A user's nine choices survive a wrong device, on a machine with GPUs and without."""
    right = {
        "data_degree": 1, "weights": "offload", "after_sampling": "unload", "compile": "on", "step_cache": 0.1,
        "convert_to_fp32": False, "rotate_method": "allgather", "ring_degree": 0, "ulysses_degree": 0,
    }  # fmt: skip
    changed, _ = mended(checking(gpus), devices="gpu7", **right)
    assert [change.name for change in changed] == ["devices"]


@pytest.mark.parametrize("gpus", [0, 1, 2, 4])
@pytest.mark.parametrize("right", RIGHT, ids=str)
def test_of_a_config_with_one_wrong_widget_as_little_as_possible_is_changed(right: dict[str, Any], gpus: int) -> None:
    """One widget, if the default of one or what the refusal says will do; else none that could have stayed."""
    check = checking(gpus, guided=True)
    if refusal(check, ParallelRequest.of(right)) is not None:
        pytest.skip("not for so many GPUs")
    for name, values in WRONG.items():
        for value in values:
            asked = ParallelRequest.of({**right, name: value})
            if (refused := refusal(check, asked)) is None:
                continue
            nearest, wrong = instead(check, asked, refused)
            changed = changes(asked, nearest)
            fixes = [refused.fix, *({each.name: each.default} for each in widgets())]
            mended = [fix for fix in fixes if refusal(check, asked.with_values(fix)) is None]
            assert len(changed) <= min(map(len, mended), default=len(changed)), (name, value, changed)
            for change in changed:
                undone = nearest.with_values({change.name: asked.values[change.name]})
                assert refusal(check, undone) is not None, (name, value, change)
            assert says_all(wrong, changed), (str(wrong), changed)


BUTTONS: dict[str, tuple[dict[str, Any], NetworkStats]] = {
    "devices.many": ({"devices": ",".join("0" * 65)}, FLUX),
    "devices.mixed": ({"devices": "0,cpu,1"}, FLUX),
    "devices.unknown": ({"devices": "gpu7"}, FLUX),
    "devices.missing": ({"devices": "0,7"}, FLUX),
    "devices.idle": ({"devices": "0,1", "cfg_degree": 1, "ring_degree": 1, "ulysses_degree": 1}, FLUX),
    "devices.idle.machines": ({**MACHINES, "devices": "0,1", "ring_degree": 1, "ulysses_degree": 2}, FLUX),
    "machines.uneven": ({**MACHINES, "ring_degree": 3, "ulysses_degree": 1}, FLUX),
    "workers.few": ({"ring_degree": 3, "ulysses_degree": 2}, FLUX),
    "workers.few.one": ({"devices": "1", "ring_degree": 3, "ulysses_degree": 2}, FLUX),
    "workers.few.machines": ({**MACHINES, "ring_degree": 9}, FLUX),
    "heads.few": ({"ulysses_degree": 2}, NetworkStats(heads=1)),
    "shares.text": ({"shares": "1;2"}, FLUX),
    "shares.count": ({"shares": "1,2,3"}, FLUX),
    "shares.nobody": ({"shares": "0,0"}, FLUX),
    "shares.unused": ({"shares": "3,2", "cfg_degree": 2}, FLUX),
    "sequence.none": ({"ring_degree": 2, "ulysses_degree": 1}, UNDIVIDED),
    "ring.node": ({"ring_degree": 2}, BY_ULYSSES),
    "stages.none": ({"pipeline_degree": 2}, UNDIVIDED),
    "stages.few": ({"pipeline_degree": 3}, replace(IN_STAGES, loads=IN_STAGES.loads[:2])),
    "stages.kept": ({"pipeline_degree": 2}, replace(IN_STAGES, loads=())),
    "pipeline.ring": ({"pipeline_degree": 2, "ring_degree": 3}, FLUX),
    "pipeline.weights": ({"pipeline_degree": 2, "weights": "shard"}, FLUX),
    "pipeline.shares": ({"pipeline_degree": 2, "shares": "3,2"}, FLUX),
    "pipeline.cache": ({"pipeline_degree": 2, "step_cache": 0.1}, FLUX),
    "patches.pipeline": ({"patches": 4}, FLUX),
    "patches.none": ({"pipeline_degree": 2, "patches": 4}, replace(IN_STAGES, why_not_in_patches="it mixes tokens")),
    "cache.blocks": ({"step_cache": 0.1}, replace(IN_STAGES, step_cacheable=False)),
    "backend.package": ({"attention_backend": "sage"}, FLUX),
    "backend.cuda": ({"attention_backend": "sage", "devices": "cpu,cpu"}, FLUX),
    "graphs.cuda": ({"cuda_graphs": "on", "devices": "cpu,cpu"}, FLUX),
}
VALUES = {
    "widget.options": {"weights": "most"},
    "widget.kind": {"ring_degree": "two"},
    "widget.range": {"cfg_degree": 99},
}
ELSEWHERE = {
    "devices.missing.all",  # on a machine without a GPU
    "patches.tokens",  # of a latent
    "file.gguf.dtype",  # a loader's
    "on.machine",  # quotes another one
}


def test_every_refusal_with_a_button_is_in_the_table() -> None:
    fixed = {code for _, call in calls("Refused") if has_fix(call) for code in codes_of(call)}
    assert fixed - ELSEWHERE <= {*BUTTONS, *VALUES}


@pytest.mark.parametrize("code", VALUES)
def test_a_sentence_on_a_value_says_what_its_button_does(code: str) -> None:
    with pytest.raises(Refused) as refused:
        ParallelRequest.of(VALUES[code])
    assert refused.value.code == code
    assert says_all(refused.value, changes_to(refused.value.fix))


@pytest.mark.parametrize("code", BUTTONS)
def test_a_sentence_says_what_its_button_does(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the refusal's own words where these work; else it ends with what does."""
    monkeypatch.setenv("CP_CLUSTER_TOKEN", "sixteen characters")
    asked, network = BUTTONS[code]
    check = checking(2, network, guided=True)
    request = ParallelRequest.of(asked)
    refused = refusal(check, request)
    assert refused is not None
    assert code in keys_of(refused.sentence)
    nearest, wrong = instead(check, request, refused)
    assert code in keys_of(wrong.sentence)
    assert says_all(wrong, changes(request, nearest)), wrong


def test_a_latent_of_few_tokens_says_how_many_patches_it_may_be_cut_into() -> None:
    def check(request: ParallelRequest) -> None:
        check_run_in_patches(request, tokens=3)
        checked_plan(PlanInputs(request=request, gpus=2))

    changed, wrong = mended(check, pipeline_degree=2, patches=8, warmup_steps=4)
    assert in_words(changed) == "patches 3"
    assert says_all(wrong, changed)


def has_fix(call: ast.Call) -> bool:
    return len(call.args) > 2 or "fix" in {keyword.arg for keyword in call.keywords}


def keys_of(sentence: object) -> set[str]:
    """The keys of a sentence and of those in it."""
    if not isinstance(sentence, Sentence):
        return set()
    return {sentence.key}.union(*(keys_of(value) for value in sentence.values.values()))


def says_all(refused: Refused, changed: Sequence[Change]) -> bool:
    """Does the sentence of a refusal name all widgets and values of its button?"""
    text = str(refused)
    return all(change.name in text and any(word in text for word in words_of(change)) for change in changed)


def words_of(change: Change) -> tuple[str, ...]:
    value = f"{change.value:g}" if isinstance(change.value, float) else str(change.value)
    return ("auto", "empty", " to 0") if change.automatic else (f" {value}", f"{value} to ")
