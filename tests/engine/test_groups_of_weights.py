"""A communicator costs memory and time on a GPU: weights have one of their own only where parts are gathered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d

from parallel_runtime.specs import ModelSpec, Parallelism, Storage
from parallel_runtime.wire.messages import Run
from parallel_runtime.worker.models import Model, Models
from parallel_runtime.worker.weights.places import Place

from ..fake_cuda import fake_group
from ..groups import flux_job

SPEC = ModelSpec(loader="tests", files=(), weight_dtype="float32")
SHAPES = [Parallelism(ulysses_degree=4), Parallelism(ring_degree=2, ulysses_degree=2)]


class Kept(Model):
    """Notes where it is kept."""

    place: Place | None = None

    def keep(self, place: Place | None) -> None:
        self.place = place

    def divide(self, parallelism: Parallelism) -> None:
        pass


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Four ranks on one machine, of which this is the last."""
    here = {"RANK": "3", "WORLD_SIZE": "4", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    with fake_group(4, rank=3):
        yield


def models() -> Models:
    return Models(torch.device("cpu"), {"": lambda spec, *_: Kept(spec, nn.Linear(2, 2))})


def place_of(models: Models, parallelism: Parallelism, storage: Storage) -> Place | None:
    model = models.get(Run(1, SPEC, parallelism, storage), lambda share: None, flux_job())
    assert isinstance(model, Kept)
    return model.place


def groups() -> int:
    return len(distributed_c10d._world.pg_map)


@pytest.mark.parametrize("parallelism", SHAPES, ids=["ulysses", "ring and ulysses"])
@pytest.mark.parametrize("storage", [Storage(), Storage(mode="offload")], ids=["replicate", "offload"])
def test_whole_weights_and_those_in_main_memory_make_no_group(parallelism: Parallelism, storage: Storage) -> None:
    held = models()
    held.mesh(parallelism)
    before = groups()
    place_of(held, parallelism, storage)
    assert groups() == before


def test_parts_have_one_group_a_shape_and_make_it_once() -> None:
    held, parallelism = models(), SHAPES[0]
    held.mesh(parallelism)
    before = groups()
    for resident in (0, 1, 0):
        place = place_of(held, parallelism, Storage(mode="shard", resident=resident))
        assert place is not None
        assert place.share == 0.25
    assert groups() == before + 1
    place_of(held, parallelism, Storage())
    assert groups() == before + 1
