"""What a lane is given of a batch: its rows, and of the options that are the run's the same as everybody."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel_runtime.worker.engine.mesh import Axis
from parallel_runtime.worker.lanes import Lanes, spread_rows


class Alone(Lanes):
    """The second of two, which hears nothing of the first."""

    def collect(self, done: Tensor, total: int) -> Tensor:
        return done


def test_rows_are_shared_out_and_what_is_the_runs_is_whole() -> None:
    given: dict[str, Any] = {}

    def evaluate(x: Tensor, **kwargs: Any) -> Tensor:
        given.update(kwargs)
        return x

    x, sigmas, uuids = torch.arange(4.0)[:, None], torch.tensor([9.0, 6.0, 3.0, 0.0]), ["a", "b"]
    options = {"sample_sigmas": sigmas, "sigmas": torch.tensor([5.0, 6.0, 7.0, 8.0]), "uuids": uuids, "wrappers": {}}
    options["cond_or_uncond"] = [1, 0]
    got = spread_rows(Alone(Axis(size=2, index=1)), evaluate, 4, x, context=[x], transformer_options=options)
    assert got.flatten().tolist() == [2, 3]
    assert given["context"][0].flatten().tolist() == [2, 3]
    inside = given["transformer_options"]
    assert inside["sample_sigmas"].tolist() == sigmas.tolist(), "as many steps as rows, by chance"
    assert inside["sigmas"].tolist() == [7, 8]
    assert (inside["cond_or_uncond"], inside["uuids"]) == ([0, 0], ["b", "b"])
    assert options["uuids"] == uuids
