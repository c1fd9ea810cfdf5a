"""The page's words and the nodes': the same ones in every language, with the same gaps, none missing or never said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
LANGUAGES = sorted(path.parent.name for path in (ROOT / "locales").glob("*/main.json"))
TRANSLATED = [language for language in LANGUAGES if language != "en"]
STATES = (
    "none", "starting", "unstarted", "sampling", "decoding", "encoding", "cancelling", "cancelled", "idle", "died",
    "unknown",
)  # fmt: skip
STAGES = ("machines", "processes", "meeting")
PHASES = ("starting", "loading", "sampling", "decoding", "encoding")
SAID_BY_STATE = {
    *(f"state.{state}" for state in STATES),
    *(f"stage.{stage}" for stage in STAGES),
    *(f"phase.{phase}" for phase in PHASES),
}


def words(language: str) -> dict[str, str]:
    return json.loads((ROOT / "locales" / language / "main.json").read_text(encoding="utf-8"))["cpSampler"]


def node_words(language: str) -> dict[str, Any]:
    """English is said by the nodes themselves."""
    return json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))


def shape(node: dict[str, Any]) -> dict[str, Any]:
    return {key: {name: sorted(texts) for name, texts in node[key].items()} for key in ("inputs", "outputs")}


def test_the_languages_that_are_promised_are_there():
    assert set(LANGUAGES) >= {"en", "zh", "ja", "ko", "fr", "de", "es", "ru"}


@pytest.mark.parametrize("language", LANGUAGES)
def test_a_language_has_every_word_and_every_gap(language):
    english, ours = words("en"), words(language)
    assert list(ours) == list(english)
    for key, text in ours.items():
        assert text.strip(), key
        assert gaps(text) == gaps(english[key]), key


@pytest.mark.parametrize("language", TRANSLATED)
def test_a_language_has_every_sentence_of_a_plan_and_every_gap(language):
    ours = json.loads((ROOT / "locales" / language / "main.json").read_text(encoding="utf-8"))["cpReport"]
    english = json.loads((ROOT / "locales" / "en" / "main.json").read_text(encoding="utf-8"))["cpReport"]
    report = (ROOT / "parallel_runtime" / "explain" / "plan_report.py").read_text()
    titles = {f"title.{title.lower()}" for title in re.findall(r'Row\("(\w+)"', report)} - {"title.note"}
    assert titles <= set(english)
    assert set(ours) == set(english)
    for key, text in english.items():
        assert gaps(ours[key]) == gaps(text), key
    words_of = {key: re.sub(r"\{\w+\}", "", text) for key, text in english.items() if key not in titles}
    sentences = [key for key, text in words_of.items() if re.search("[a-z]{3}", text)]
    assert not [key for key in sentences if ours[key] == english[key]], "these are English"


@pytest.mark.parametrize("language", TRANSLATED)
def test_a_language_has_a_name_and_a_tooltip_for_the_same_things(language):
    nodes, others = node_words(language), node_words(TRANSLATED[0])
    assert {name: shape(node) for name, node in nodes.items()} == {name: shape(node) for name, node in others.items()}
    for name, node in nodes.items():
        descriptions = [node, *node["inputs"].values(), *node["outputs"].values()]
        assert all(text.strip() for one in descriptions for text in one.values() if isinstance(text, str)), name


@pytest.mark.parametrize("language", TRANSLATED)
def test_a_translation_is_none_that_was_forgotten(language):
    """The same tooltip in two languages is one that nobody has translated."""
    for name, node in node_words(language).items():
        for other in set(TRANSLATED) - {language}:
            theirs = node_words(other)[name]
            assert node["description"] != theirs["description"], (name, other)
            for input, texts in node["inputs"].items():
                assert texts["tooltip"] != theirs["inputs"][input]["tooltip"], (name, input, other)


def test_what_the_page_says_has_words_and_what_has_words_is_said():
    code = "".join(path.read_text() for path in (ROOT / "web").glob("*.js"))
    keys = set(re.findall(r'"([a-z]+(?:\.[a-z]+)*)"', code)) | SAID_BY_STATE
    settings = re.findall(r'(?:number|entry)\("\w+", "(\w+)"', code)
    keys |= {f"settings.{word}{tip}" for word in settings for tip in ("", ".tip")}
    keys |= {f"{name}.tip" for name in re.findall(r'button\("(\w+)"', code)}
    keys |= {f"plan.{column}" for column in ("tokens", "heads", "weights")}
    presets = re.findall(r"^  (\w+): \{", (ROOT / "web" / "presets.js").read_text(), re.MULTILINE)
    keys |= {f"preset.{name}{hint}" for name in presets for hint in ("", ".hint")}
    asked = set(re.findall(r'say\("([\w.]+)"', code))
    assert asked - words("en").keys() == set()
    assert words("en").keys() - keys == set()


def gaps(text: str) -> list[str]:
    return sorted(re.findall(r"\{\w+\}", text))
