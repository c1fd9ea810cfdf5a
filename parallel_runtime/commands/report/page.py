"""Writes each result at once: as a line of report.jsonl, and in the tables of report.md."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import Refused

Measurement = dict[str, Any]  # by the names of COLUMNS, and "failed": why there is no more to tell

NAME, ENDINGS = "report", (".jsonl", ".md")


class Column(NamedTuple):
    """How a value is written; its title, "" for its name; and how it is written on a line, which has no titles."""

    value: str = "{}"
    title: str = ""
    on_a_line: str = "{}"


COLUMNS = {  # of all parts, in their order
    "what": Column(),
    "dtype": Column(),
    "weights": Column(),
    "workers": Column(on_a_line="workers: {}"),
    "degrees": Column(),
    "mode": Column(),
    "error": Column("{:.1e}", on_a_line="error {}"),
    "seconds": Column("{:.2f} s", "time"),
    "ms": Column("{:.3g} ms", "time"),
    "host_ms": Column("{:.3g} ms", "of the host", "{} of the host"),
    "faster": Column("{:.2f} x", "as fast as the first", "{} as fast as the first"),
    "gib": Column("{:.2f} GiB", "memory"),
    "graph_gib": Column("{:.2f} GiB", "of a graph", "{} of a graph"),
    "links": Column("{:.1f} GB/s", "between workers", "{} between workers"),
    "note": Column(),
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
            lines += ["", f"## {title}", *_table([_cells(measurement) for measurement in measurements])]
        self._text.write_text("\n".join(lines) + "\n")


def in_a_line(measurement: Measurement) -> str:
    """Returns the measurement as a line of the terminal."""
    return ", ".join(COLUMNS[name].on_a_line.format(cell) for name, cell in _cells(measurement).items())


def _cells(measurement: Measurement) -> dict[str, str]:
    """Returns what is written in each column that is not empty."""
    note = f"FAILED: {measurement['failed']}" if "failed" in measurement else measurement.get("note")
    values = {name: (measurement | {"note": note}).get(name) for name in COLUMNS}
    filled = {name: value for name, value in values.items() if value not in (None, "")}
    return {name: COLUMNS[name].value.format(value).replace("|", "/") for name, value in filled.items()}


def _table(rows: list[dict[str, str]]) -> Iterable[str]:
    names = [name for name in COLUMNS if any(name in row for row in rows)]
    yield from ("", _line(COLUMNS[name].title or name for name in names), _line("---" for _ in names))
    yield from (_line(row.get(name, "") for name in names) for row in rows)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
