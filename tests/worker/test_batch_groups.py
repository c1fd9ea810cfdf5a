"""A batch group gets its rows of a batch, and all options that belong to the whole run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_runtime.engine.comm.mesh import MeshDim
from parallel_runtime.worker import batch_groups
from parallel_runtime.worker.batch_groups import data_parallel


def test_rows_are_divided_and_options_of_the_run_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_groups, "all_gather", lambda dim, local, total: local)  # nothing of the first group
    received: dict[str, Any] = {}

    def evaluate(x: Tensor, **kwargs: Any) -> Tensor:
        received.update(kwargs)
        return x

    x, sigmas, uuids = torch.arange(4.0)[:, None], torch.tensor([9.0, 6.0, 3.0, 0.0]), ["a", "b"]
    options = {"sample_sigmas": sigmas, "sigmas": torch.tensor([5.0, 6.0, 7.0, 8.0]), "uuids": uuids, "wrappers": {}}
    options["cond_or_uncond"] = [1, 0]
    got = data_parallel(MeshDim(size=2, index=1), evaluate, 4, x, context=[x], transformer_options=options)
    assert got.flatten().tolist() == [2, 3]
    assert received["context"][0].flatten().tolist() == [2, 3]
    inside = received["transformer_options"]
    assert inside["sample_sigmas"].tolist() == sigmas.tolist(), "as many steps as rows, by chance"
    assert inside["sigmas"].tolist() == [7, 8]
    assert (inside["cond_or_uncond"], inside["uuids"]) == ([0, 0], ["b", "b"])
    assert options["uuids"] == uuids
