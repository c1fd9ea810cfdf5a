"""The sentences that users read, by their code in locales/*/main.json: here in English, on the page in the user's
language. cpReport is CP Plan's, cpRefusals has refusals, cpDeaths how workers ended; cpDeveloper is English only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

ENGLISH = Path(__file__).parents[1] / "locales" / "en" / "main.json"
SECTIONS = ("cpReport", "cpRefusals", "cpDeaths", "cpDeveloper")
QUOTED_CHARACTERS = 80
SENTENCES: Mapping[str, str] = {
    code: sentence
    for section, sentences in json.loads(ENGLISH.read_text(encoding="utf-8")).items()
    if section in SECTIONS
    for code, sentence in sentences.items()
}


class Sentence(str):
    """A sentence in English that also carries its code and values, for other languages."""

    key: str
    values: dict[str, Any]


def say(key: str, /, **values: Any) -> Sentence:
    """Returns the sentence of this code. `values` are plain JSON, lists of it, or other Sentences."""
    english = {name: ", ".join(map(str, value)) if isinstance(value, list) else value for name, value in values.items()}
    sentence = Sentence(SENTENCES[key].format(**english) if key in SENTENCES else key)
    sentence.key, sentence.values = key, values
    return sentence


def quoted(value: object) -> str:
    """Returns the repr of a user's input, cut to QUOTED_CHARACTERS."""
    text = repr(value)
    return text if len(text) <= QUOTED_CHARACTERS else f"{text[: QUOTED_CHARACTERS - 1]}…"


def say_if(holds: object, key: str, /, **values: Any) -> str:
    """Returns the sentence if `holds`, else ""."""
    return say(key, **values) if holds else ""


def listed(sentences: Sequence[Sentence], key: str = "and") -> Sentence:
    """Joins sentences; `key` is the sentence that joins two."""
    return reduce(lambda one, other: say(key, one=one, other=other), sentences)


def to_json(value: Any) -> Any:
    """Returns plain JSON: a Sentence as {"code", "values"}, and a value that JSON cannot hold (an exception) as its
    text, since ComfyUI's server fails at an event that it cannot serialize."""
    if isinstance(value, Sentence):
        return {"code": value.key, "values": {name: to_json(part) for name, part in value.values.items()}}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)


def from_json(value: Any) -> Any:
    """Reads what `to_json` made."""
    if isinstance(value, dict):
        return say(value["code"], **{name: from_json(part) for name, part in value["values"].items()})
    return [from_json(item) for item in value] if isinstance(value, list) else value
