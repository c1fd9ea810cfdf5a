"""Refusals come to the page as English, and get words of other languages by their pattern (web/understood.js).
What a CP Parallel Config is refused by has them in each, and none are of a sentence that nobody says any more."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from parallel_runtime.errors import Refused
from parallel_runtime.host.cost import Figures
from parallel_runtime.host.pipelines import check_stages
from parallel_runtime.host.planning import Wish, plan
from parallel_runtime.host.storing import Capacity, Case, decide
from parallel_runtime.loads import Load
from parallel_runtime.specs import Parallelism, ParallelRequest
from parallel_runtime.wire.handshake import TOKEN

ROOT = Path(__file__).resolve().parents[1]
RUNTIME = ROOT / "parallel_runtime"
SOURCES = [RUNTIME / "specs.py", *(path for folder in (RUNTIME, ROOT / "nodes") for path in folder.rglob("*.py"))]
TRANSLATED = sorted({path.parent.name for path in (ROOT / "locales").glob("*/main.json")} - {"en"})
GAP = r"\{\w*\}"
MACHINES = {"nnodes": 2, "rdzv_endpoint": "127.0.0.1:29500"}
PLANNED: tuple[tuple[int, dict[str, Any]], ...] = (  # GPUs, and a config that does not work there
    (2, {"ring_degree": 3, "ulysses_degree": 3}),
    (1, {"ring_degree": 2, "ulysses_degree": 1}),
    (0, {"ring_degree": 64, "ulysses_degree": 64}),
    (1, {"ring_degree": 1, "ulysses_degree": 25, "devices": ",".join(["0"] * 30)}),
    (2, {"ring_degree": 9, "ulysses_degree": 1, **MACHINES}),
    (1, {"ring_degree": 9, "ulysses_degree": 1, **MACHINES}),
    (4, {"ring_degree": 1, "ulysses_degree": 2, "devices": "0,1", **MACHINES}),
    (2, {"cfg_degree": 2, "ring_degree": 1, "ulysses_degree": 1, "shares": "3,2"}),
    (2, {"devices": "7"}),
    (0, {"devices": "7"}),
    (2, {"devices": "0,1", "ring_degree": 1, "ulysses_degree": 1}),
)
FIGURES = Figures(
    name="FLUX", heads=24, layers=3, width=64, weights=10, weight_bytes=20 << 30, item_bytes=2, blocks=(5 << 30,) * 3,
    loads=(Load(0, 1),) * 3,
)  # fmt: skip
PARTS = ("{} {}, and pipeline_degree is {}; set it to {}", "worker(s){}; name {}, or set degrees to 0")


def words(language: str) -> dict[str, str]:
    """By the English sentence."""
    return json.loads((ROOT / "locales" / language / "main.json").read_text(encoding="utf-8"))["cpRefusals"]


LONGEST_FIRST = sorted(words(TRANSLATED[0]), key=lambda one: -len(re.sub(GAP, "", one)))


@pytest.mark.parametrize("language", TRANSLATED)
def test_a_language_has_what_the_others_have_and_every_gap(language: str) -> None:
    assert list(words(language)) == list(words(TRANSLATED[0]))
    for english, text in words(language).items():
        assert sorted(re.findall(GAP, text)) == sorted(re.findall(GAP, english)), english
        assert text != english or english == "true or false"


def test_words_are_of_sentences_that_somebody_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was edited has lost its words in every language."""
    there = {written(node) for path in SOURCES for node in ast.walk(ast.parse(path.read_text()))}
    composed = {english for one in raised(monkeypatch) for english in understood(one)}
    for english in LONGEST_FIRST:
        assert re.sub(GAP, "{}", english) in there or english in composed, english


@pytest.mark.parametrize("name", ["planning.py", "devices.py", "shares.py", "pipelines.py"])
def test_what_a_config_is_refused_by_has_words(name: str) -> None:
    calls = (node for node in ast.walk(ast.parse((RUNTIME / "host" / name).read_text())) if isinstance(node, ast.Call))
    sentences = [written(call.args[0]) for call in calls if getattr(call.func, "id", "") == "Refused"]
    assert sentences
    for sentence in filter(None, sentences):
        assert sentence.endswith(PARTS) or understood(sentence.replace("{}", "0")), sentence


def test_what_is_made_of_parts_has_words_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for english in raised(monkeypatch):
        assert understood(english), english


def raised(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv(TOKEN, "a token of many characters")
    for gpus, values in PLANNED:
        yield refusal(plan, Wish(request=ParallelRequest(**values), heads=24, gpus=gpus, guided=True))
    monkeypatch.setattr("sys.argv", ["main.py"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    yield refusal(plan, Wish(request=ParallelRequest(ring_degree=2, ulysses_degree=1), heads=24, gpus=1))
    for values in ({"dtype": "banana"}, {"ring_degree": "three"}):
        yield refusal(ParallelRequest.of, values)
    for figures in (FIGURES, replace(FIGURES, loads=())):
        yield refusal(check_stages, ParallelRequest(pipeline_degree=9), figures)
    for weight, blocks in ((0, ()), (1, (1 << 20,) * 9)):
        figures = replace(FIGURES, weights=10 << 30 >> weight, loads=(), blocks=blocks)
        yield from too_large(figures)


def too_large(figures: Figures) -> Iterator[str]:
    for host in (None, 1 << 20):
        for tokens, room in ((4608, 1), (4608, 12), (1 << 20, 30)):
            capacity = Capacity(device_bytes=room << 30, host_bytes=host)
            case = Case(work=figures.work(1, tokens), degrees=Parallelism(), link=None, capacity=capacity)
            try:
                decide("auto", case)
            except Refused as refused:
                yield str(refused)


def refusal(act: Any, *given: Any) -> str:
    with pytest.raises(Refused) as refused:
        act(*given)
    return str(refused.value)


def understood(english: str) -> list[str]:
    """The sentence that fits, as the page finds it, and those in its gaps."""
    english = english.removesuffix(".")
    for sentence in LONGEST_FIRST:
        if found := re.fullmatch("(.*?)".join(map(re.escape, re.split(GAP, sentence))), english, re.DOTALL):
            return [sentence, *(inner for value in found.groups() for inner in understood(value))]
    return []


def written(node: ast.AST) -> str:
    """A text in the code, with {} for what is filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
