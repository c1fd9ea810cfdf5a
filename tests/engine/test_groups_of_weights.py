"""A communicator costs memory and time on a GPU: weights have one of their own only where parts are gathered."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import pytest
import torch
from torch import nn
from torch.distributed import distributed_c10d
from torch.profiler import profile

from parallel_runtime.engine.prefetch import RankPlacement
from parallel_runtime.jobs import DemoJob
from parallel_runtime.request import AfterSampling
from parallel_runtime.specs import ModelSpec, Parallelism, WeightPlacement
from parallel_runtime.wire.messages import Run
from parallel_runtime.worker.models import Model, Models

from ..fake_cuda import fake_group
from ..groups import flux_job

SPEC = ModelSpec(loader="tests", files=(), weight_dtype="float32")
SHAPES = [Parallelism(ulysses_degree=4), Parallelism(ring_degree=2, ulysses_degree=2)]


class Kept(Model):
    """Records where its weights were placed."""

    place: RankPlacement | None = None

    def place_weights(self, place: RankPlacement | None) -> None:
        self.place = place

    def split(self, parallelism: Parallelism) -> None:
        pass


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Four ranks on one machine, of which this is the last."""
    environment = {"RANK": "3", "WORLD_SIZE": "4", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with fake_group(4, rank=3):
        yield


def models() -> Models:
    return Models(torch.device("cpu"), {DemoJob: lambda spec, *_: Kept(spec, nn.Linear(2, 2))})


def place_of(models: Models, parallelism: Parallelism, storage: WeightPlacement) -> RankPlacement | None:
    model = models.get(Run(1, SPEC, parallelism, storage), lambda share: None, flux_job())
    assert isinstance(model, Kept)
    return model.place


def groups() -> int:
    return len(distributed_c10d._world.pg_map)


@pytest.mark.parametrize("parallelism", SHAPES, ids=["ulysses", "ring and ulysses"])
@pytest.mark.parametrize("storage", [WeightPlacement(), WeightPlacement(mode="offload")], ids=["replicate", "offload"])
def test_whole_weights_and_those_in_main_memory_make_no_group(
    parallelism: Parallelism, storage: WeightPlacement
) -> None:
    kept_models = models()
    kept_models.mesh(parallelism)
    before = groups()
    place_of(kept_models, parallelism, storage)
    assert groups() == before


@pytest.mark.parametrize("parallelism", [*SHAPES, Parallelism(cfg_degree=2, data_degree=2)], ids=str)
@pytest.mark.parametrize("mode", ["replicate", "shard"])
def test_a_run_makes_no_group_whose_memory_its_plan_has_not_counted(
    parallelism: Parallelism, mode: Literal["replicate", "shard"]
) -> None:
    """NCCL takes gigabytes of a GPU for a communicator at its first exchange: both come before the plan's readings."""
    kept_models = models()
    first = groups()
    with profile() as exchanged:
        kept_models.connect(parallelism, sharded=mode == "shard")
    made = groups() - first
    exchanges = [event for event in exchanged.events() if event.name == "c10d::alltoall_base_"]
    assert len(exchanges) >= max(1, made)
    place_of(kept_models, parallelism, WeightPlacement(mode=mode))
    with profile() as exchanged:
        kept_models.connect(parallelism, sharded=mode == "shard")
    assert groups() == first + made
    assert not [event for event in exchanged.events() if "alltoall" in event.name], "once"


@pytest.mark.parametrize("after", get_args(AfterSampling))
def test_conditions_of_a_native_samplers_run_go_with_it(after: AfterSampling) -> None:
    kept_models = models()
    model = kept_models.get(Run(1, SPEC, SHAPES[0], WeightPlacement()), lambda share: None, flux_job())
    model.cond_arguments[1] = {"context": torch.zeros(2)}
    kept_models.free(SPEC, after)
    assert not model.cond_arguments
    assert (model in kept_models.loaded) == (after != "unload")


def test_parts_have_one_group_a_shape_and_make_it_once() -> None:
    kept_models, parallelism = models(), SHAPES[0]
    kept_models.mesh(parallelism)
    before = groups()
    for resident in (0, 1, 0):
        place = place_of(kept_models, parallelism, WeightPlacement(mode="shard", resident_blocks=resident))
        assert place is not None
        assert place.local_fraction == 0.25
    assert groups() == before + 1
    place_of(kept_models, parallelism, WeightPlacement())
    assert groups() == before + 1


def test_groups_of_degrees_that_no_model_has_any_more_are_let_go() -> None:
    """But for the last few: a user who tries degrees would pile up communicators, which take memory of a GPU."""
    kept_models, counts = models(), []
    shapes = [
        Parallelism(ring_degree=2, ulysses_degree=2),
        Parallelism(cfg_degree=2, ulysses_degree=2),
        Parallelism(data_degree=2, ring_degree=2),
        Parallelism(data_degree=2, cfg_degree=2),
        Parallelism(pipeline_degree=2, ulysses_degree=2),
    ]
    for parallelism in [*shapes, *shapes]:
        place_of(kept_models, parallelism, WeightPlacement(mode="shard"))
        counts.append(groups())
    assert max(counts[:5]) == max(counts[5:]) == counts[2]
