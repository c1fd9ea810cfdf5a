"""What every test may rely on: `gpu` tests skip where torch sees no CUDA device, `sweep` tests wait to be asked for.

What was skipped is said in one line for each reason.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter

import pytest

SWEEP = "CP_TEST_SWEEP"


def _sees_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch  # two seconds: only when a gpu test was collected

    return torch.cuda.is_available()


def pytest_report_header() -> str | None:
    return None if os.environ.get(SWEEP) else f"of tests marked `sweep` a part runs; all do with {SWEEP}=1, or by name"


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
    cases: Counter[str] = Counter()
    run, left = [], []
    for item in items:
        one_in = min((marker.kwargs.get("one_in", 0) for marker in item.iter_markers("sweep")), default=1)
        function = item.nodeid.partition("[")[0]
        (run if one_in and cases[function] % one_in == 0 else left).append(item)
        cases[function] += 1
    items[:] = run
    config.hook.pytest_deselected(items=left)
