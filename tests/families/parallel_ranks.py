"""One rank of a torchrun group: every family's bridge alone, then over all ranks, and how far the two are apart.

    torchrun --nproc-per-node N -m tests.families.parallel_ranks FOLDER

Rank 0 writes FOLDER/differences.json: {"<family> <case> <mode>": largest difference over the output's deviation}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_runtime.specs import Parallelism
from parallel_runtime.worker.engine.attach import attach, detach
from parallel_runtime.worker.engine.diffusers_plans import plan_of
from parallel_runtime.worker.engine.mesh import ContextMesh, build_mesh
from parallel_runtime.worker.loading import Loaded, load
from parallel_runtime.worker.step_cache import StepCache

from ..tiny import TINY, hints, write
from .parallel_cases import cases

Call = tuple[Tensor, Tensor, dict[str, Any]]


def evaluate(loaded: Loaded, name: str, case: str, mesh: ContextMesh) -> Tensor:
    call = call_of(loaded, name, case)
    if case == "skipping":
        return skipping(loaded, mesh, *call)
    return loaded.family.call(loaded.transformer, *call)


def skipping(loaded: Loaded, mesh: ContextMesh, x: Tensor, timestep: Tensor, cond: dict[str, Any]) -> Tensor:
    """Three evaluations, of which the last one changes little and skips all blocks but the first."""
    generator = torch.Generator().manual_seed(4)
    noise, other = (torch.randn(x.shape, generator=generator) for _ in range(2))
    cache = StepCache(loaded.transformer, plan_of(loaded.transformer), mesh, 0.2)
    outputs, skipped = [], []
    with cache.caching():
        for latent in (x, other, other + 0.01 * noise):
            with cache.branch("the only one"):
                outputs.append(loaded.family.call(loaded.transformer, latent, timestep, cond))
            skipped.append(cache.skipped)
    assert skipped == [0, 0, 1], f"{loaded.family.name} skipped {skipped}"
    return torch.stack(outputs)


def call_of(loaded: Loaded, name: str, case: str) -> Call:
    tiny = TINY[name]
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    batch, (_, channels, *size) = 2 if case == "batch" else 1, tiny.latent
    if case in ("odd", "skipping"):
        size[-2:] = [size[-2] - 1, size[-1] - 3]
    text = tiny.text[0] if tiny.clip_vision else tiny.text[0] - 3
    used = torch.arange(text) < torch.tensor([text - 2 * (row + 1) for row in range(batch)])[:, None]
    frames = size[0] if loaded.family.patch == 2 else size[0] * size[-2] * size[-1]
    timestep = torch.rand(batch, frames, generator=generator) if case == "kept" else torch.full((batch,), 0.7)
    cond = {
        "c_crossattn": normal(batch, text, tiny.text[1]),
        "y": normal(1, tiny.pooled) if tiny.pooled else None,
        "guidance": torch.tensor([tiny.guidance]) if tiny.guidance else None,
        "clip_fea": normal(1, 257, 1280) if tiny.clip_vision else None,
        "attention_mask": used.long() if case == "masked" else None,
    }
    x = normal(batch, loaded.family.config()["in_channels"] if tiny.clip_vision else channels, *size)
    return x, timestep, cond


def differences(name: str, folder: Path, modes: dict[str, tuple[Parallelism, ContextMesh]]) -> dict[str, float]:
    path = write(folder / str(dist.get_rank()), name)
    loaded = load(path, weight_dtype=torch.float32, compute_dtype=torch.float32, hints=hints(name))
    found = {}
    for case in cases(name):
        alone = evaluate(loaded, name, case, ContextMesh())
        for mode, (degrees, mesh) in modes.items():
            attach(loaded.transformer, mesh, degrees)
            together = evaluate(loaded, name, case, mesh)
            detach(loaded.transformer)
            found[f"{name} {case} {mode}"] = ((together - alone).abs().max() / alone.std()).item()
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    degrees = {"ring": Parallelism(ring_degree=ranks), "ulysses": Parallelism(ulysses_degree=ranks)}
    modes = {mode: (cut, build_mesh(cut)) for mode, cut in degrees.items()}
    found: dict[str, float] = {}
    for name in TINY:
        found.update(differences(name, folder, modes))
    if dist.get_rank() == 0:
        (folder / "differences.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
