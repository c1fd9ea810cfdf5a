"""One rank of a torchrun group: every family's bridge alone, then over all ranks, and how far the two are apart.

    torchrun --nproc-per-node N -m tests.families.parallel_ranks FOLDER

Rank 0 writes FOLDER/differences.json: {"<family> <case> <mode>": largest difference over the output's deviation}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_runtime.specs import Parallelism
from parallel_runtime.worker.engine.attach import attach, detach
from parallel_runtime.worker.loading import Loaded, load

from ..tiny import TINY, hints, write
from .parallel_cases import cases


def evaluate(loaded: Loaded, name: str, case: str) -> Tensor:
    tiny = TINY[name]
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    batch, (_, channels, *size) = 2 if case == "batch" else 1, tiny.latent
    if case == "odd":
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
    return loaded.family.call(loaded.transformer, x, timestep, cond)


def differences(name: str, folder: Path, ranks: int) -> dict[str, float]:
    path = write(folder / str(dist.get_rank()), name)
    loaded = load(path, weight_dtype=torch.float32, compute_dtype=torch.float32, hints=hints(name))
    found = {}
    for case in cases(name):
        alone = evaluate(loaded, name, case)
        for mode, degrees in {"ring": (ranks, 1), "ulysses": (1, ranks)}.items():
            attach(
                loaded.transformer,
                None,
                Parallelism(ring_degree=degrees[0], ulysses_degree=degrees[1]),
                plan=loaded.family.plan,
            )
            together = evaluate(loaded, name, case)
            detach(loaded.transformer)
            found[f"{name} {case} {mode}"] = ((together - alone).abs().max() / alone.std()).item()
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    dist.init_process_group("gloo")
    found: dict[str, float] = {}
    for name in TINY:
        found.update(differences(name, folder, dist.get_world_size()))
    if dist.get_rank() == 0:
        (folder / "differences.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
