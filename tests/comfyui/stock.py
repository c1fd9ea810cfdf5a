"""Every workflow of ComfyUI's own template package, and what CP nodes do with it: python -m tests.comfyui.stock [--all]

Reads the package that is installed beside ComfyUI; nothing of it is copied. Runs nothing: see stock_verdicts.py.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_runtime.commands.migrate import migrated

from .comfy import ComfyInstall, find_comfy, why_there_is_none
from .stock_verdicts import WORST_FIRST, Verdict, verdicts

log = logging.getLogger(__name__)

PACKAGE = "comfyui_workflow_templates"
WHERE = f"""import importlib.metadata as found
for part in found.distributions():
    if part.name.replace("-", "_").lower().startswith({PACKAGE!r}):
        for file in part.files or ():
            if file.suffix == ".json" and "dist-info" not in str(file):
                print(part.locate_file(file))
print(found.version({PACKAGE!r}))"""


@dataclass(frozen=True)
class Read:
    """One workflow, and what its samplers do once they are swapped."""

    name: str
    of_samplers: tuple[Verdict, ...]

    @property
    def worst(self) -> Verdict | None:
        return self.of_samplers[0] if self.of_samplers else None


def stock(comfy: ComfyInstall) -> tuple[str, list[Read]]:
    """The package's version and its workflows."""
    found = subprocess.run([comfy.python, "-c", WHERE], capture_output=True, text=True, check=True)
    *files, version = found.stdout.split("\n")[:-1]
    return version, [read(Path(file).stem, workflow) for file, workflow in _workflows(files)]


def read(name: str, workflow: dict[str, Any]) -> Read:
    """Raises ValueError for what cannot be migrated."""
    result, _ = migrated(workflow)
    return Read(name, tuple(verdicts(result)))


def table(version: str, read: list[Read]) -> str:
    """The day's numbers: workflows by what becomes of the worst of their samplers, and why."""
    ours = [one for one in read if one.worst is not None]
    lines = [
        f"{PACKAGE} {version}: {len(read)} workflows, all of them migrated. {len(ours)} sample, with CP nodes alone.",
        "",
        "| the workers | workflows | which, and why |",
        "|---|---|---|",
    ]
    for outcome in reversed(WORST_FIRST):
        found = [one for one in ours if one.worst and one.worst.outcome == outcome]
        lines.append(f"| {outcome} | {len(found)} | {_reasons(found)} |")
    return "\n".join(lines)


def _reasons(found: list[Read]) -> str:
    reasons = Counter(one.worst.why for one in found if one.worst and one.worst.why)
    return "; ".join(f"{why} ({count})" for why, count in reasons.most_common())


def _workflows(files: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted(files):
        workflow = json.loads(Path(file).read_text(encoding="utf-8"))
        if isinstance(workflow, dict) and "nodes" in workflow:
            yield file, workflow


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.comfyui.stock", description=__doc__)
    parser.add_argument("--all", action="store_true", help="a line for every workflow that samples, too")
    wanted = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    if (comfy := find_comfy()) is None:
        log.error("%s", why_there_is_none())
        return 1
    version, found = stock(comfy)
    for one in found if wanted.all else ():
        for verdict in one.of_samplers:
            log.info("%s: %s, %s%s", one.name, verdict.network, verdict.outcome, verdict.why and f": {verdict.why}")
    log.info("%s", table(version, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
