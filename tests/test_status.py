"""What the page is told of a group follows what it is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from parallel_runtime.host import status
from parallel_runtime.host.status import Activity
from parallel_runtime.jobs import EvaluationJob
from parallel_runtime.specs import ModelSpec, Parallelism
from parallel_runtime.wire.messages import Beat


def test_a_run_after_a_native_samplers_is_not_over_while_it_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "BETWEEN_EVALUATIONS", 0.0)
    activity, model, run = Activity(), ModelSpec(loader="a"), object()
    evaluation: Any = EvaluationJob(each={}, options=None, prompt=1, conds=None, patches=None, together=False)
    activity.asked(model, Parallelism(), evaluation)
    activity.answered(evaluation)
    activity.asked(ModelSpec(loader="b"), Parallelism(), run)  # type: ignore[arg-type]
    assert activity.now.state == "loading"
    activity.heard(0, Beat(1, None))
    activity.rest()
    assert activity.now.state == "sampling"
