"""What every test may rely on: `gpu` tests skip where torch sees no CUDA device, and of `sweep` tests a part runs, each
day another one; in ./tests/run of all tests of the slow folders too.

What was skipped is said in one line for each reason.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

SWEEP = "CP_TEST_SWEEP"
DAY = "CP_TEST_DAY"  # the number of the day whose part of the cases runs; otherwise today's
TESTS = Path(__file__).parent
SLOW = (
    "architectures", "bench", "browser", "comfyui", "commands", "demo", "engine", "for_diffusers", "group", "machines",
    "planning", "rows",
)  # fmt: skip
DAYS = (
    "CP_TEST_DAYS"  # in so many days every case of SLOW folders has run; ./tests/run sets it, as all take half an hour
)


def _sees_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch  # two seconds: only when a gpu test was collected

    return torch.cuda.is_available()


def pytest_report_header() -> str | None:
    partly = (
        f"of tests marked `sweep`{' and of slow folders' if os.environ.get(DAYS) else ''} the part of {DAY}={day()} "
        f"runs: all with ./tests/run --all or {SWEEP}=1, and what is named"
    )
    return None if os.environ.get(SWEEP) else partly


def day() -> int:
    return int(os.environ.get(DAY) or date.today().toordinal())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanting_a_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if wanting_a_gpu and not _sees_cuda():
        for item in wanting_a_gpu:
            item.add_marker(pytest.mark.skip(reason="NO GPU: torch sees no CUDA device here"))
    if not os.environ.get(SWEEP) and not any("::" in argument for argument in config.args):
        _leave_out_what_waits(config, items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"skipped {count}: {reason}")


def _leave_out_what_waits(config: pytest.Config, items: list[pytest.Item]) -> None:
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        if None not in _shares(item):
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    used: Counter[tuple[str, str, str]] = Counter()
    various = {item for cases in functions.values() for item in _most_various(cases, used)}
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if item in various:
            files.setdefault(item.path, []).append(item)
    run = {item for path, cases in files.items() for item in _of_this_day(path, cases)}
    config.hook.pytest_deselected(items=[item for item in items if item not in run])
    items[:] = [item for item in items if item in run]


def _of_this_day(path: Path, cases: list[pytest.Item]) -> list[pytest.Item]:
    """Returns the cases of a file that run today, at least one: neighbours, which have fixtures in common."""
    days = int(os.environ.get(DAYS) or 1) if path.relative_to(TESTS).parts[0] in SLOW else 1
    parts = min(days, len(cases))
    part = day() % parts
    return cases[len(cases) * part // parts : len(cases) * (part + 1) // parts]


def _shares(item: pytest.Item) -> list[int | None]:
    return [marker.kwargs.get("one_in") for marker in item.iter_markers("sweep")]


def _most_various(cases: list[pytest.Item], used: Counter[tuple[str, str, str]]) -> Iterator[pytest.Item]:
    """One in `one_in` of a function's cases: the day's first, so that in as many days each has run, and then each time
    the one whose parameters the file has `used` least."""
    first = day() % len(cases)
    cases = [*cases[first:], *cases[:first]]
    chosen = cases[0]
    for _ in range(-(-len(cases) // max(filter(None, _shares(cases[0])), default=1))):
        cases.remove(chosen)
        used.update(_values(chosen))
        yield chosen
        chosen = min(cases, key=lambda case: sum(used[value] for value in _values(case)), default=chosen)


def _values(case: pytest.Item) -> list[tuple[str, str, str]]:
    """File, name and value of each parameter."""
    params = case.callspec.params if isinstance(case, pytest.Function) and hasattr(case, "callspec") else {}
    return [(str(case.path), name, str(value)) for name, value in params.items()]
