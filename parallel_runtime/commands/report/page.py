"""Writes each result at once: as a line of report.jsonl, and in the tables of report.md."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...errors import Refused
from .cases import Measurement

NAME, ENDINGS = "report", (".jsonl", ".md")
COLUMNS = {  # of all parts, in their order, and how each is written
    "what": "{}",
    "dtype": "{}",
    "weights": "{}",
    "workers": "{}",
    "degrees": "{}",
    "mode": "{}",
    "error": "{:.1e}",
    "seconds": "{:.2f} s",
    "ms": "{:.3g} ms",
    "host_ms": "{:.3g} ms",
    "faster": "{:.2f} x",
    "gib": "{:.2f} GiB",
    "graph_gib": "{:.2f} GiB",
    "note": "{}",
}
TITLES = {
    "seconds": "time", "ms": "time", "host_ms": "of the host", "faster": "as fast as the first", "gib": "memory",
    "graph_gib": "of a graph",
}  # fmt: skip
ON_A_LINE = {  # where no title stands above
    "workers": "workers: {}",
    "error": "error {}",
    "host_ms": "{} of the host",
    "faster": "{} as fast as the first",
    "graph_gib": "{} of a graph",
}


class Page:
    """The two files of a report. `out` is their path without the endings, or a folder. Raises Refused where they cannot
    be written."""

    def __init__(self, out: Path, machine: dict[str, Any]) -> None:
        self.out = out / NAME if out.is_dir() else out.with_suffix("") if out.suffix in ENDINGS else out
        self._lines, self._text = (self.out.with_name(self.out.name + ending) for ending in ENDINGS)
        self._machine = machine
        self._sections: list[tuple[str, list[Measurement]]] = []
        try:
            self._lines.write_text(json.dumps({"machine": machine}) + "\n")
            self._write()
        except OSError as error:
            raise Refused("report.unwritten", error=str(error)) from None

    def section(self, title: str) -> None:
        self._sections.append((title, []))

    def add(self, measurement: Measurement) -> None:
        title, measurements = self._sections[-1]
        measurements.append(measurement)
        with self._lines.open("a") as file:
            file.write(json.dumps({"section": title, **measurement}) + "\n")
        self._write()

    def _write(self) -> None:
        lines = ["## Machine", *(f"- {name}: {value}" for name, value in self._machine.items() if name != "topology")]
        if self._machine.get("topology"):
            lines += ["", "```", self._machine["topology"], "```"]
        for title, measurements in self._sections:
            lines += [
                "",
                f"## {title}",
                *_table([{**measurement, "note": note_of(measurement)} for measurement in measurements]),
            ]
        self._text.write_text("\n".join(lines) + "\n")


def note_of(measurement: Measurement) -> str:
    return f"FAILED: {measurement['failed']}" if "failed" in measurement else str(measurement.get("note", ""))


def in_a_line(measurement: Measurement) -> str:
    """Returns the measurement as a line of the terminal."""
    cells = [ON_A_LINE.get(name, "{}").format(_cell(measurement, name)) for name in COLUMNS if name in measurement]
    return ", ".join(cells if "failed" not in measurement else [*cells, note_of(measurement)])


def _table(measurements: list[Measurement]) -> Iterable[str]:
    names = [name for name in COLUMNS if any(measurement.get(name) not in (None, "") for measurement in measurements)]
    yield from ("", _line(TITLES.get(name, name) for name in names), _line("---" for _ in names))
    yield from (_line(_cell(measurement, name) for name in names) for measurement in measurements)


def _cell(measurement: Measurement, name: str) -> str:
    return COLUMNS[name].format(measurement[name]).replace("|", "/") if measurement.get(name) not in (None, "") else ""


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
