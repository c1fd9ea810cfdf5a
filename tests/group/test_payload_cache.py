"""What workers have been sent is not sent again, as long as they have it."""

from __future__ import annotations

from typing import Any

import torch

from parallel_runtime.group.worker_group import PayloadCache
from parallel_runtime.jobs import EvaluationJob
from parallel_runtime.specs import ModelSpec

MODEL, OTHER = ModelSpec(loader="a"), ModelSpec(loader="b")


def evaluated(sent: PayloadCache, model: ModelSpec, **more: Any) -> EvaluationJob:
    """What is sent of one more evaluation of the same prompt."""
    conds = {"context": torch.ones(2, 3), **more}
    job = EvaluationJob(call_arguments={}, options=None, cond_arguments=conds, weight_patches={}, batch_coupled=False)
    with sent.unsent_parts(job, model) as unsent:
        assert isinstance(unsent, EvaluationJob)
        return unsent


def test_conditions_are_sent_once_a_run_of_each_model() -> None:
    sent = PayloadCache()
    first, second, of_other = evaluated(sent, MODEL), evaluated(sent, MODEL), evaluated(sent, OTHER)
    assert first.cond_arguments is not None
    assert (second.cond_arguments, second.cond_number) == (None, first.cond_number)
    assert of_other.cond_arguments is not None, "each model has its own"
    sent.free(MODEL, "keep")
    assert sent.has_model(MODEL)
    again = evaluated(sent, MODEL)
    assert again.cond_arguments is not None
    assert again.cond_number not in (first.cond_number, of_other.cond_number)
    assert evaluated(sent, OTHER).cond_arguments is None


def test_conditions_that_changed_in_place_are_sent_again() -> None:
    sent, mask = PayloadCache(), torch.zeros(2)
    assert evaluated(sent, MODEL, mask=mask).cond_arguments is not None
    mask += 1
    assert evaluated(sent, MODEL, mask=mask).cond_arguments is not None
    assert evaluated(sent, MODEL, mask=mask).cond_arguments is None


def test_conditions_may_hold_tuples_of_tensors() -> None:
    sent = PayloadCache()
    assert evaluated(sent, MODEL, shapes=(torch.ones(2), 3)).cond_arguments is not None
    assert evaluated(sent, MODEL, shapes=(torch.ones(2), 3)).cond_arguments is None
    assert evaluated(sent, MODEL, shapes=(torch.zeros(2), 3)).cond_arguments is not None
