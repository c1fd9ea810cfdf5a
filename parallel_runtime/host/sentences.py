"""What CP Plan says, by the keys of locales/*/main.json (cpReport): here in English, on the page as its user speaks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

ENGLISH = Path(__file__).parents[2] / "locales" / "en" / "main.json"
SENTENCES: Mapping[str, str] = json.loads(ENGLISH.read_text(encoding="utf-8"))["cpReport"]


class Said(str):
    """One of SENTENCES, which knows what it says: for other languages."""

    key: str
    values: dict[str, Any]


def say(key: str, **values: Any) -> Said:
    """`values` as they are to be read, sentences among them."""
    said = Said(SENTENCES[key].format(**values))
    said.key, said.values = key, values
    return said


def when(holds: object, key: str, **values: Any) -> str:
    """What to `say` where that holds; "" where it does not."""
    return say(key, **values) if holds else ""


def listed(sentences: Sequence[Said], key: str = "and") -> Said:
    """One after the other, as `key` joins two."""
    return reduce(lambda one, other: say(key, one=one, other=other), sentences)


def for_page(sentence: str) -> str | list[Any]:
    """Key and values of what is Said, or else the text."""
    if not isinstance(sentence, Said):
        return sentence
    values = {name: for_page(value) if isinstance(value, str) else value for name, value in sentence.values.items()}
    return [sentence.key, values]
