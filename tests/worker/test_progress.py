"""Latents are sent to the host once their copy is in main memory, and nothing waits for them."""

from functools import partial

import torch

from parallel_runtime.worker.progress import Previews


def test_on_the_cpu_a_step_is_sent_at_once() -> None:
    sent: list[dict[str, torch.Tensor]] = []
    Previews().offer({"x": torch.ones(2)}, sent.append)
    assert [latents["x"].tolist() for latents in sent] == [[1.0, 1.0]]


def test_a_step_whose_copy_is_pending_is_sent_later_and_the_next_is_dropped() -> None:
    sent: list[dict[str, torch.Tensor]] = []
    arrived = [False]
    previews = Previews()
    previews._arrived, previews._send = lambda: arrived[0], partial(sent.append, {"x": torch.ones(1)})
    previews.offer({"x": torch.zeros(1)}, sent.append)
    assert not sent
    arrived[0] = True
    previews.flush()
    previews.flush()
    assert [latents["x"].tolist() for latents in sent] == [[1.0]]
    previews.offer({"x": torch.full((1,), 2.0)}, sent.append)
    assert len(sent) == 2
