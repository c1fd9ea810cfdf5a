"""A refusal is a code and values: its sentence is in every language, with a gap for each value."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from parallel_runtime.errors import SECTIONS, SENTENCES, Refused, Unsplittable, from_json, say, to_json
from parallel_runtime.wire.messages import PACKET_BYTES, Done, Refusal, decode, encode

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [path for folder in ("parallel_runtime", "nodes") for path in (ROOT / folder).rglob("*.py")]
TRANSLATED = sorted({path.parent.name for path in (ROOT / "locales").glob("*/main.json")} - {"en"})
RAISED = ("Refused", "Unsendable")
OPTIONS = {"widget", "fix"}


def section(language: str, name: str) -> dict[str, str]:
    return json.loads((ROOT / "locales" / language / "main.json").read_text(encoding="utf-8"))[name]


def test_every_refusal_has_a_code_with_a_sentence_whose_gaps_are_its_values() -> None:
    for where, call in calls(*RAISED, "say"):
        codes, values = codes_of(call), {keyword.arg for keyword in call.keywords}
        if None in values or (not codes and name_of(call) == "say"):
            continue  # what came over the wire, or is said again
        assert codes, f"{where}: a refusal's first argument is its code"
        for code in codes:
            assert code in SENTENCES, f"{where}: {code}"
            needed = set(gaps(SENTENCES[code]))
            assert needed <= values, f"{where}: {code}"
            assert name_of(call) == "say" or needed == values - OPTIONS, f"{where}: {code}"
            made = Refused if name_of(call) in RAISED else say
            assert not gaps(str(made(code, **dict.fromkeys(values - OPTIONS, 1)))), f"{where}: {code}"


def test_every_sentence_of_a_refusal_is_raised() -> None:
    words = {node.value for _, tree in trees() for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    kinds = {f"kind.{kind}" for kind in ("bool", "int", "float", "str")}
    for name in ("cpRefusals", "cpDeaths", "cpDeveloper"):
        assert set(section("en", name)) - words - kinds == set()


@pytest.mark.parametrize("name", ["cpRefusals", "cpDeaths"])
@pytest.mark.parametrize("language", TRANSLATED)
def test_a_language_has_every_refusal_and_every_death_and_every_gap(language: str, name: str) -> None:
    english, ours = section("en", name), section(language, name)
    assert list(ours) == list(english)
    for code, text in ours.items():
        assert gaps(text) == gaps(english[code]), code
        assert text != english[code] or not re.search("[a-z]{3} [a-z]{3}", re.sub(r"\{\w+\}", "", text)), code


def test_no_code_is_used_twice() -> None:
    assert len(SENTENCES) == sum(len(section("en", name)) for name in SECTIONS)


def test_what_travels_is_the_same_refusal_at_the_other_end_and_fits_into_a_packet() -> None:
    inner = say("on.machine", reason="x", machine="10.0.0.2")
    refused = Refused("on.machine", widget="devices", fix={"devices": ""}, reason=inner, machine="\N{SNOWMAN}" * 10**6)
    data = encode(Done(1, refused=Refusal.of(refused)))
    assert len(data) < PACKET_BYTES
    again = decode(data).refused.raised()
    assert (again.code, again.widget, again.fix) == ("on.machine", "devices", {"devices": ""})
    assert again.values["reason"] == inner
    assert again.values["reason"].values == inner.values
    assert str(refused).startswith(str(again)[:-1])
    assert str(decode(data).refused.raised("10.0.0.3")).endswith("(on 10.0.0.3)")


def test_what_cannot_be_split_keeps_its_detail_and_its_way_out_on_the_way_to_the_page() -> None:
    for widgets in ((), ("patches",)):
        done = Done(1, refused=Refusal.of(Unsplittable("norm over dim 2", *widgets)))
        refused = decode(encode(done)).refused.raised()
        named = list(widgets or ("ring_degree", "ulysses_degree"))
        assert (refused.code, refused.widget) == ("network.split", named[0])
        assert to_json(refused.sentence)["values"] == {"detail": "norm over dim 2", "widgets": named}
        assert str(refused).endswith(f"(norm over dim 2); set {', '.join(named)} to 1")


def test_the_engine_refuses_no_input_without_a_way_out() -> None:
    """What a network or an input is refused for is for a report; what users can do stands in all languages."""
    developers = section("en", "cpDeveloper")
    for where, call in calls(*RAISED):
        if where.startswith("parallel_runtime/engine"):
            assert not set(codes_of(call)) & set(developers), where


def test_a_sentence_within_a_sentence_is_data_for_the_page() -> None:
    sentence = say("on.machine", reason=say("elsewhere"), machine=["a", "b"])
    data = {"code": "on.machine", "values": {"reason": {"code": "elsewhere", "values": {}}, "machine": ["a", "b"]}}
    assert to_json(sentence) == data
    assert from_json(data) == sentence
    assert sentence.endswith("(on a, b)")


def trees() -> Iterator[tuple[Path, ast.Module]]:
    yield from ((path, ast.parse(path.read_text())) for path in SOURCES)


def calls(*names: str) -> Iterator[tuple[str, ast.Call]]:
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and name_of(node) in names and (node.args or node.keywords):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def name_of(call: ast.Call) -> str:
    return getattr(call.func, "id", "") or getattr(call.func, "attr", "")


def codes_of(call: ast.Call) -> list[str]:
    """The literal codes of a call: one, or two of which a condition chooses."""
    first: Any = call.args[0] if call.args else None
    options = [first.body, first.orelse] if isinstance(first, ast.IfExp) else [first]
    return [one.value for one in options if isinstance(one, ast.Constant) and isinstance(one.value, str)]


def gaps(text: str) -> list[str]:
    return sorted(set(re.findall(r"\{(\w+)\}", text)))


def test_whatever_a_sentence_is_about_the_page_gets_json() -> None:
    """ComfyUI's server ends at an event that it cannot write."""
    sentence = say("elsewhere", why=LookupError("no such file"), shape=(1, 2), kind=Path)
    assert to_json(sentence)["values"] == {"why": "no such file", "shape": [1, 2], "kind": str(Path)}
    json.dumps(to_json(sentence), allow_nan=False)
