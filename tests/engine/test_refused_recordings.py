"""A forward that is refused in its middle says nothing of how long a launch takes, and leaves no recording behind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from parallel_runtime.engine import graph_runner
from parallel_runtime.errors import Refused

from ..site.tape import TapeRecorder


class Net(nn.Module):
    """Refuses the forwards of these numbers."""

    def __init__(self, refused: set[int]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.forwards = 0
        self._refused = refused

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.forwards += 1
        if self.forwards - 1 in self._refused:
            raise Refused("no")
        return self.linear(x)


@pytest.fixture(autouse=True)
def by_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_runner.cuda_graphs, "recorder_for", lambda device: TapeRecorder())
    monkeypatch.setattr(graph_runner, "MIN_LAUNCH_FRACTION", 0.0)
    monkeypatch.setattr(graph_runner, "WARMUP_EVALUATIONS", 1)
    monkeypatch.setattr(graph_runner, "MAX_REPLAY_RATIO", float("inf"))  # a tape is no faster than what it replays


@pytest.mark.parametrize("refused", [{0}, {0, 1, 2}, {1}, {1, 2}], ids=str)
@torch.inference_mode()
def test_a_refused_forward_is_as_if_it_had_not_been(refused: set[int]) -> None:
    torch.manual_seed(1)
    network, x = Net(refused), torch.randn(2, 4)
    want = network.linear(network.linear(x))
    runner = graph_runner.GraphRunner(network, torch.device("cpu"))
    logged = 0
    for _ in range(8):
        try:
            assert torch.equal(network(x), want)
        except Refused:
            logged += 1
    assert logged == len(refused)
    assert runner.stats.eager == ()
    assert runner.stats.keys == 1
    assert runner.stats.replays == 8 - len(refused) - 2, "all but the first evaluation, and the recorded one"
