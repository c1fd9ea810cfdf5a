"""What a look at GPUs without one has found: memory that is given back and counted whole, times, random numbers."""

from __future__ import annotations

import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from parallel_runtime.engine.comm import ranks  # noqa: E402
from parallel_runtime.jobs import DemoJob  # noqa: E402
from parallel_runtime.planning.memory_model import ACTIVATION_RESERVE_TENSORS, estimate_activation_bytes  # noqa: E402
from parallel_runtime.planning.network_stats import NetworkStats  # noqa: E402
from parallel_runtime.specs import ModelSpec, Parallelism, WeightPlacement  # noqa: E402
from parallel_runtime.wire.bundles import write_bundle  # noqa: E402
from parallel_runtime.wire.messages import Run  # noqa: E402
from parallel_runtime.worker import models, serve  # noqa: E402
from parallel_runtime.worker.models import Model  # noqa: E402

CPU = torch.device("cpu")
FIGURES = NetworkStats(name="tiny", heads=4, layers=2, width=64, weights=10, weight_bytes=20, item_bytes=2)
JOB = DemoJob(noise=torch.zeros(1), sigmas=torch.zeros(2), cfg=1.0, positive={}, negative={})


class Silent:
    """A channel on which the host says nothing."""

    def offer(self, *_: Any) -> bool:
        return True

    def waiting(self) -> bool:
        return False


def answer(monkeypatch: pytest.MonkeyPatch) -> serve.Done:
    """What a worker without a group makes of a job whose loop takes no time."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("GROUP_RANK", "0"), ("GROUP_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)

    def load(spec: ModelSpec, *_: Any) -> Model:
        return Model(spec, torch.nn.Linear(2, 2))

    kinds: models.JobKinds = {DemoJob: (load, lambda *_: {"samples": torch.zeros(1)})}
    worker = serve.Worker(Silent(), CPU, kinds)  # type: ignore[arg-type]
    bundle = write_bundle({"kind": "DemoJob", **vars(JOB)})
    return worker._answer(Run(1, ModelSpec(loader="none"), Parallelism(), WeightPlacement()), bundle)[0]


def test_a_run_takes_until_its_result_has_come_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(_: dict[str, Any]) -> None:
        time.sleep(0.2)

    monkeypatch.setattr(serve, "write_bundle", slow)
    assert answer(monkeypatch).seconds >= 0.2


def test_the_cache_of_the_device_is_given_back_after_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(models, "empty_cache", lambda device: given.append(device.type))
    answer(monkeypatch)
    assert given == ["cpu"]


def test_giving_back_means_the_allocators_cache_on_every_kind_of_device(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: calls.append("emptied"))
    for kind in ("cpu", "cuda", "xpu"):
        ranks.empty_cache(torch.device(kind))
    assert calls == ["emptied", "emptied"]


def test_both_prompts_of_a_group_count_for_memory_since_they_run_as_one_batch() -> None:
    tensor = 100 * 64 * 2
    work = FIGURES.work(1, 100, prompts=2)
    assert max(estimate_activation_bytes(work, Parallelism())) == ACTIVATION_RESERVE_TENSORS * 2 * tensor
    assert max(estimate_activation_bytes(work, Parallelism(cfg_degree=2))) == ACTIVATION_RESERVE_TENSORS * tensor
    assert max(estimate_activation_bytes(work, Parallelism(ring_degree=2))) == ACTIVATION_RESERVE_TENSORS * tensor


def test_rows_count_as_far_as_one_group_has_them() -> None:
    work = FIGURES.work(3, 100)
    assert (
        max(estimate_activation_bytes(work, Parallelism(data_degree=2)))
        == ACTIVATION_RESERVE_TENSORS * 2 * 100 * 64 * 2
    )


def test_with_a_step_cache_prompts_run_one_by_one() -> None:
    assert FIGURES.work(1, 100, prompts=2, cached=True).prompts == 1
