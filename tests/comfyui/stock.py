"""Every workflow of ComfyUI's own template package, and what CP nodes do with it:

    python -m tests.comfyui.stock [--all] [--templates FOLDER]
    python -m tests.comfyui.stock --run [NAME ...] [--workers 2] [--jobs 1]

Reads the package that is installed beside ComfyUI, or a newer one of which FOLDER has the wheels (`pip download
--no-deps -d FOLDER comfyui-workflow-templates==0.11.97 comfyui-workflow-templates-json==0.1.123`), with a line for each
workflow that is new there; nothing of it is copied. Without --run it runs nothing, and reads
what stock_verdicts.py knows. With it each workflow that samples is made small, and sampled natively and on CPU workers
(stock_graphs.py, stock_small.py, stock_run.py), on as many ComfyUIs side by side as there are jobs. A NAME may be the
file that `report --workflow` wrote.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_runtime.commands.migrate import migrated

from .client import Graph
from .comfy import ComfyInstall, find_comfy, why_there_is_none
from .server import running_server
from .stock_graphs import NoBrowser, graphs
from .stock_run import Row, run_all, run_table
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
    version, workflows = templates(comfy)
    return version, [read(name, workflow) for name, workflow in workflows.items()]


def templates(comfy: ComfyInstall) -> tuple[str, dict[str, dict[str, Any]]]:
    """The package's version and its workflows as they are saved, by name."""
    listed = subprocess.run([comfy.python, "-c", WHERE], capture_output=True, text=True, check=True)
    *files, version = listed.stdout.split("\n")[:-1]
    return version, {Path(file).stem: workflow for file, workflow in _workflows(files)}


def templates_in(folder: Path) -> tuple[str, dict[str, dict[str, Any]]]:
    """The same of the wheels in `folder`. Raises LookupError where it has none."""
    wheels = sorted(folder.glob(f"{PACKAGE}*.whl"))
    version = next((wheel.name.split("-")[1] for wheel in wheels if wheel.name.startswith(f"{PACKAGE}-")), None)
    workflows: dict[str, dict[str, Any]] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as files:
            for name in files.namelist():
                if name.endswith(".json") and "dist-info" not in name:
                    workflow = json.loads(files.read(name))
                    if isinstance(workflow, dict) and "nodes" in workflow:
                        workflows[Path(name).stem] = workflow
    if version is None or not workflows:
        raise LookupError(f"{folder} has no wheels of {PACKAGE} and of its workflows, {PACKAGE}_json")
    return version, dict(sorted(workflows.items()))


def sampling_graphs(comfy: ComfyInstall, names: Sequence[str] = ()) -> dict[str, Graph]:
    """The API graphs of the workflows that sample, or of those named; a name that ends in .json is a file."""
    version, workflows = templates(comfy)
    chosen = {name: one for name, one in workflows.items() if name in names or (not names and read(name, one).worst)}
    files = [Path(name) for name in names if name.endswith(".json")]
    if unknown := {*names} - {*chosen} - {*map(str, files)}:
        raise LookupError(f"{PACKAGE} {version} has no {', '.join(sorted(unknown))}")
    made = graphs(comfy, version, chosen) if chosen else {}
    return made | {file.stem: _users(comfy, file) for file in files}


def _users(comfy: ComfyInstall, file: Path) -> Graph:
    """A user's workflow, or a report of one; what the page has to convert is kept under a digest of its text."""
    text = file.read_text(encoding="utf-8")
    workflow = json.loads(text)
    workflow = workflow.get("workflow", workflow.get("prompt", workflow))
    if "nodes" not in workflow:
        return workflow
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return graphs(comfy, "of-users", {digest: workflow})[digest]


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
        reads = [one for one in ours if one.worst and one.worst.outcome == outcome]
        lines.append(f"| {outcome} | {len(reads)} | {_reasons(reads)} |")
    return "\n".join(lines)


def table_of_new(known: set[str], read: list[Read]) -> str:
    """A line for each workflow that samples and is not among those `known`: what the workers do, and why."""
    new = [one for one in read if one.worst is not None and one.name not in known]
    lines = [f"{len(new)} of them are new:", "", "| workflow | network | the workers | why |", "|---|---|---|---|"]
    for one in new:
        assert one.worst is not None
        lines.append(f"| {one.name} | {one.worst.network} | {one.worst.outcome} | {one.worst.why} |")
    return "\n".join(lines)


def _reasons(reads: list[Read]) -> str:
    reasons = Counter(one.worst.why for one in reads if one.worst and one.worst.why)
    return "; ".join(f"{why} ({count})" for why, count in reasons.most_common())


def _workflows(files: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted(files):
        workflow = json.loads(Path(file).read_text(encoding="utf-8"))
        if isinstance(workflow, dict) and "nodes" in workflow:
            yield file, workflow


def _run(comfy: ComfyInstall, names: Sequence[str], workers: int, jobs: int) -> int:
    try:
        chosen = sampling_graphs(comfy, names)
    except (NoBrowser, LookupError) as lacking:
        log.error("%s", lacking)
        return 2
    parts = [dict(list(chosen.items())[job::jobs]) for job in range(min(jobs, len(chosen)))]

    def run(part: dict[str, Graph]) -> list[Row]:
        with running_server(comfy) as server:
            return run_all(server, part, workers)

    with ThreadPoolExecutor(jobs) as pool:
        rows = [row for made in pool.map(run, parts) for row in made]
    log.info("%s", run_table(rows))
    return int(any(row.outcome in ("different", "unclear", "failed") for row in rows))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.comfyui.stock", description=__doc__)
    parser.add_argument("--all", action="store_true", help="a line for every workflow that samples, too")
    parser.add_argument("--templates", type=Path, metavar="FOLDER", help="wheels of another package of workflows")
    parser.add_argument("--run", nargs="*", metavar="NAME", help="sample them: every one, or those named")
    parser.add_argument("--workers", type=int, default=2, help="that divide each run, in a ring")
    parser.add_argument("--jobs", type=int, default=1, help="ComfyUIs side by side, each with its workers")
    wanted = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    if (comfy := find_comfy()) is None:
        log.error("%s", why_there_is_none())
        return 1
    if wanted.run is not None:
        return _run(comfy, wanted.run, wanted.workers, wanted.jobs)
    version, reads = stock(comfy)
    known = {one.name for one in reads}
    if wanted.templates is not None:
        try:
            version, workflows = templates_in(wanted.templates)
        except LookupError as lacking:
            log.error("%s", lacking)
            return 2
        reads = [read(name, workflow) for name, workflow in workflows.items()]
    for one in reads if wanted.all else ():
        for verdict in one.of_samplers:
            log.info("%s: %s, %s%s", one.name, verdict.network, verdict.outcome, verdict.why and f": {verdict.why}")
    log.info("%s", table(version, reads))
    if wanted.templates is not None:
        log.info("\n%s", table_of_new(known, reads))
    return 0


if __name__ == "__main__":
    sys.exit(main())
