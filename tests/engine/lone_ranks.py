"""Two ranks of which only the second one's tokens move from one evaluation to the next.

    python -m tests.engine.lone_ranks voted|unvoted FOLDER

Each writes FOLDER/<rank>_decided, whether it skips, and FOLDER/<rank>_done when the evaluation is over.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_runtime.engine.comm.mesh import MeshDim
from parallel_runtime.for_diffusers import attach
from parallel_runtime.for_diffusers.plans import plan_of
from parallel_runtime.worker.step_cache import StepCache

from .meshes import mesh, parallelism
from .model_cases import output
from .tiny import build, inputs

THRESHOLD = 0.3
_LIMIT = timedelta(hours=1)  # of a collective: as in the workers, none gives up before the test does


class Unvoted(StepCache):
    """What each rank would decide of its own tokens."""

    def _all_gather(self, local: Tensor, dim: MeshDim) -> Tensor:
        return local[None]


@torch.no_grad()
def evaluate(rank: int, mode: str, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("cpu:gloo", store=store, rank=rank, world_size=2, timeout=_LIMIT)
    transformer, first = build("flux"), inputs("flux", image=40)
    attach(transformer, mesh(1, 2), parallelism(1, 2))
    cache = (Unvoted if mode == "unvoted" else StepCache)(transformer, plan_of(transformer), mesh(1, 2), THRESHOLD)
    latent = first["hidden_states"].clone()
    latent[:, 20:] += 3 * torch.randn(latent[:, 20:].shape, generator=torch.Generator().manual_seed(1))
    with cache.caching(), cache.branch("the only one"):
        output(transformer, first)
        transformer.transformer_blocks[0].register_forward_hook(_say(cache, folder / f"{rank}_decided"))  # type: ignore[union-attr, index, operator]
        output(transformer, {**first, "hidden_states": latent})
    (folder / f"{rank}_done").touch()


def _say(cache: StepCache, path: Path) -> Any:
    def say(*_: Any) -> None:
        path.with_suffix(".part").write_text(str(cache.skipped == 1))
        path.with_suffix(".part").replace(path)

    return say


def main(mode: str, folder: Path) -> None:
    ranks = [multiprocessing.Process(target=evaluate, args=(rank, mode, folder)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
