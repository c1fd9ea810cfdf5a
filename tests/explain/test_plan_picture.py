"""The plan's picture shows what the ranks of a mesh really share out."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from parallel_runtime.explain.plan_words import parts
from parallel_runtime.planning.run_plan import RunPlan
from parallel_runtime.specs import Parallelism, Placement, WeightPlacement

MESHES = list(itertools.product((1, 2), (1, 2), (1, 3), (1, 4)))


@pytest.mark.parametrize(("data", "cfg", "ring", "ulysses"), MESHES)
def test_every_group_covers_the_sequence_once_and_every_ulysses_group_the_heads(data, cfg, ring, ulysses):
    degrees = Parallelism(data_degree=data, cfg_degree=cfg, ring_degree=ring, ulysses_degree=ulysses)
    shown = parts(RunPlan(degrees=degrees, placement=Placement(devices=("cpu",) * degrees.world_size)))
    assert [part.rank for part in shown] == list(range(degrees.world_size))
    size = degrees.context_parallel_size
    for group in range(data * cfg):
        members = shown[group * size : (group + 1) * size]
        assert len({part.lane for part in members}) == 1
        assert covered([part.tokens for part in members])
        for group in range(ring):
            assert covered([part.heads for part in members[group * ulysses : (group + 1) * ulysses]])
    assert len({part.lane for part in shown}) == data * cfg


def test_weights_are_whole_unless_they_are_sharded():
    degrees = Parallelism(ulysses_degree=2, cfg_degree=2)
    four = RunPlan(degrees=degrees, placement=Placement(devices=("cpu",) * 4))
    assert {part.weights for part in parts(four)} == {(0, 1)}
    in_shards = replace(four, weights=WeightPlacement(mode="shard"))
    sharded = [part.weights for part in parts(in_shards, weights=[0.5] * 4)]
    assert covered(sharded[:2])
    assert covered(sharded[2:]), "each half of the workers has all of them"
    assert {part.weights for part in parts(four, weights=[0.25] * 4)} == {(0, 0.25)}, "the rest is fetched"
    first, second = (part.weights for part in parts(in_shards, weights=[0.75] * 4)[:2])
    assert (first, second) == ((0, 0.75), (0.25, 1)), "some blocks are resident on both"


def test_shares_are_drawn_as_they_are():
    degrees = Parallelism(ring_degree=2, ulysses_degree=2, shares=(1, 2, 3, 4))
    shown = parts(RunPlan(degrees=degrees, placement=Placement(devices=("cpu",) * 4)))
    assert [round(to - start, 9) for start, to in (part.tokens for part in shown)] == [0.1, 0.2, 0.3, 0.4]
    assert covered([part.tokens for part in shown])
    assert [part.heads for part in shown] == [(0, 0.4), (0.4, 1)] * 2, "1 + 3 and 2 + 4: a ring's keys keep their heads"


def test_ranks_of_other_machines_are_shown_too():
    placement = Placement(devices=("cuda:0", "cuda:1"), nnodes=2, rdzv_endpoint="10.0.0.1:29500")
    assert [part.device for part in parts(RunPlan(degrees=Parallelism(ulysses_degree=4), placement=placement))] == [
        "cuda:0",
        "cuda:1",
    ] * 2


def covered(shares: list[tuple[float, float]]) -> bool:
    """From 0 to 1, side by side."""
    ends = sorted(shares)
    return ends[0][0] == 0 and ends[-1][1] == 1 and all(a[1] == b[0] for a, b in itertools.pairwise(ends))
