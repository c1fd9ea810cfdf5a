"""Groups cost communicators: there are no more than the ranks that talk apart, and all wait as long as the world."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import json, sys
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore
from parallel_runtime.specs import Parallelism
from parallel_runtime.engine.comm.mesh import build_mesh
answers = []
for data, cfg, ring, ulysses in json.loads(sys.argv[1]):
    world = data * cfg * ring * ulysses
    dist.init_process_group("fake", store=FakeStore(), rank=world - 1, world_size=world)
    mesh = build_mesh(Parallelism(data_degree=data, cfg_degree=cfg, ring_degree=ring, ulysses_degree=ulysses))
    mesh_dims = {name: getattr(mesh, name) for name in ("data", "cfg", "ring", "ulysses", "context")}
    answers.append({
        "groups": len(distributed_c10d._world.pg_map),
        "ranks": {name: mesh_dim.ranks if mesh_dim.group else [] for name, mesh_dim in mesh_dims.items()},
        "device_mesh": mesh.device_mesh.size(),
    })
    dist.destroy_process_group()
print(json.dumps(answers))
"""
GROUPS = {(1, 1, 1, 4): 1, (1, 1, 4, 1): 1, (1, 1, 2, 2): 3, (1, 2, 1, 2): 3, (1, 2, 2, 2): 5}


@pytest.fixture(scope="module")
def answers() -> dict[tuple[int, ...], Any]:
    command = [sys.executable, "-c", SCRIPT, json.dumps(list(GROUPS))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    return dict(zip(GROUPS, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("shape", GROUPS, ids=str)
def test_only_ranks_that_talk_apart_have_a_group(answers: dict[tuple[int, ...], Any], shape: tuple[int, ...]) -> None:
    answer = answers[shape]
    assert answer["groups"] <= GROUPS[shape]
    sizes = {name: len(ranks) for name, ranks in answer["ranks"].items()}
    data, cfg, ring, ulysses = (size if size > 1 else 0 for size in shape)
    context = shape[2] * shape[3]
    assert sizes == {"data": data, "cfg": cfg, "ring": ring, "ulysses": ulysses, "context": context}
    assert answer["device_mesh"] == context
