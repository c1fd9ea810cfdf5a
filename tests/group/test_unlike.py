"""A group of two kinds of devices, of which one rounds the end of a forward in its own way: it samples all the same."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from parallel_runtime.engine.comm.ranks import device_kind
from parallel_runtime.group.worker_group import WorkerGroup
from parallel_runtime.specs import Parallelism

from ..groups import on_cpu, sabotage, samples, spec_of
from ..zoo.checkpoints import write

ULYSSES = Parallelism(ulysses_degree=2)


def test_latents_stay_the_same_on_cards_of_two_kinds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That the ranks' latents differ would end the run: on unlike devices they are compared after each step."""
    model = spec_of(write(tmp_path, "flux_schnell"))
    sabotage(monkeypatch, "1 kind unlike;1 forward deviate")
    with WorkerGroup(on_cpu(ULYSSES)) as group:
        first, second = (samples(group, model, ULYSSES, steps=2) for _ in range(2))
    assert (first - second).abs().max() == 0, "rank 0 had nothing of its own"


def test_cards_of_one_kind_with_another_cudnn_are_unlike(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has other kernels: they round in other ways, and one machine would choose kernels that only it has."""
    card = SimpleNamespace(name="NVIDIA H100 80GB HBM3", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    kinds = []
    for version in (91900, 91400, 91900):
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        kinds.append(device_kind(torch.device("cuda:0")))
    assert kinds[0] == kinds[2] != kinds[1]


def test_cards_of_one_kind_with_another_package_of_kernels_are_unlike(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They may attend with what only one machine has installed."""
    card = SimpleNamespace(name="NVIDIA A100", multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    without = device_kind(torch.device("cuda:0"))
    (tmp_path / "sageattention.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert device_kind(torch.device("cuda:0")) == f"{without} sageattention"
    (metadata := tmp_path / "sageattention-2.0.dist-info").mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sageattention\nVersion: 2.0\n")
    assert device_kind(torch.device("cuda:0")) == f"{without} sageattention 2.0", "workers may refuse an older one"
