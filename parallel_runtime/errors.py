"""Errors that the runtime raises on purpose, how workers die, and the sentences that say so.

ParallelError
  Refused            the request cannot be honoured; its sentence has the value and the way out (also a ValueError).
                     The process that raises it, a worker too, goes on afterwards
  WorkerLost         the group has ended; its `cause` names the worker that failed first, and how
    WorkerStartError the group did not come up
    WorkerDied       the group exited, or stopped answering, during a request
    WorkerFailed     a rank raised; carries the traceback
  OutOfMemory        raised in a worker whose device has too little memory: the host gets a WorkerFailed
  ProtocolError      received bytes that are not a valid message or bundle

The sentences that users read stand by their code in locales/*/main.json: here in English, on the page in the user's
language. cpReport is CP Plan's, cpRefusals has refusals, cpDeaths how workers ended; cpDeveloper is English only."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Literal

ENGLISH = Path(__file__).parents[1] / "locales" / "en" / "main.json"
SECTIONS = ("cpReport", "cpRefusals", "cpDeaths", "cpDeveloper")
QUOTED_CHARACTERS = 80
BAD_INPUT = (AttributeError, LookupError, TypeError, ValueError)  # raised for tokens of another text encoder
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
    """Returns plain JSON: a Sentence as {"code", "values"}, and what JSON cannot hold (an exception) as its text."""
    # ComfyUI's server fails at an event that it cannot serialize.
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


class ParallelError(Exception):
    """Base of all errors that the runtime raises on purpose. `sentence` is its text; a Sentence can be translated."""

    def __init__(self, sentence: str = "") -> None:
        super().__init__(sentence)
        self.sentence = sentence

    def __str__(self) -> str:
        return str(self.sentence)


ON_ANOTHER_RANK = "elsewhere"


class Refused(ParallelError, ValueError):
    """The request is invalid, or the workers cannot do it. `code` names a sentence in locales/*/main.json, `values`
    fill its placeholders with plain JSON or other Sentences (`say`). `widget` is the one of CP Parallel Config to
    change, if any; `fix` maps its widgets to values that would work. Without a code, another rank has the reason."""

    def __init__(
        self, code: str = ON_ANOTHER_RANK, /, widget: str | None = None, fix: Mapping[str, Any] | None = None,
        **values: Any,
    ) -> None:  # fmt: skip
        super().__init__(say(code, **values))
        self.code, self.values, self.widget, self.fix = code, values, widget, dict(fix or {})


class Unsplittable(Refused):
    """A network, or input, that cannot be divided; `detail` says why in English. It runs with `widgets` at 1."""

    def __init__(self, detail: str, *widgets: str) -> None:
        widgets = widgets or ("ring_degree", "ulysses_degree")
        super().__init__("network.split", widgets[0], detail=detail, widgets=list(widgets))
        self.detail = detail


@dataclass(frozen=True, kw_only=True)
class Cause:
    """How a worker ended. It was killed by `signal`, exited with `exit_code`, lost its torchrun to `signal`, vanished
    for an unknown reason ("gone"), was silent for too long, raised an exception, or ran out of memory.
    `host_memory_full`: while it lived, Linux killed a process since main memory ran out."""

    kind: Literal["killed", "exited", "torchrun", "gone", "silent", "raised", "out_of_memory"]
    rank: int
    signal: str = ""  # its name, such as SIGKILL
    exit_code: int | None = None
    host_memory_full: bool = False

    def sentence(self, worker: str) -> Sentence:
        """Describes a cause that is known from outside the worker. `worker` is its name for the user."""
        match self.kind:
            case "killed":
                code = "died.killed.memory" if self.signal == "SIGKILL" and self.host_memory_full else "died.killed"
                return say(code, worker=worker, signal=self.signal)
            case "exited":
                return say("died.exited", worker=worker, code=self.exit_code)
            case "torchrun":
                return say("died.torchrun", worker=worker, signal=self.signal)
        return say("died.gone", worker=worker)


class WorkerLost(ParallelError):
    """The group has ended; `cause` is that of the first worker that failed, None if there was none or none is known."""

    def __init__(self, sentence: str, cause: Cause | None = None) -> None:
        super().__init__(sentence)
        self.cause = cause


class WorkerStartError(WorkerLost):
    pass


class WorkerDied(WorkerLost):
    pass


class WorkerFailed(WorkerLost):
    cause: Cause

    def __init__(self, sentence: str, cause: Cause, traceback: str) -> None:
        super().__init__(sentence, cause)
        self.traceback = traceback


class OutOfMemory(ParallelError):
    """Raised in a worker: its device has too little memory."""


class ProtocolError(ParallelError):
    pass
