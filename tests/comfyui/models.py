"""The models folder of a test server: one tiny checkpoint a family, one full checkpoint, one LoRA."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..zoo import checkpoints
from .graphs import TEXTS


def write_models(models: Path) -> None:
    for family in TEXTS:
        written = checkpoints.write(models / "diffusion_models", family)
        written.rename(written.with_name(f"{family}.safetensors"))
    full = checkpoints.write(models / "checkpoints", "flux_dev", prefix="model.diffusion_model.", seed=77)
    full.rename(full.with_name("flux_dev_full.safetensors"))
    (models / "loras").mkdir()
    save_file(_lora_for_flux(), models / "loras" / "flux_dev.safetensors")


@contextmanager
def other_weights_in(path: Path) -> Iterator[None]:
    """For a while the file has another model's weights, but looks the same: name, size and time. Who loads it now
    samples something else; who has loaded it before is not disturbed."""
    kept, status = path.with_name("kept"), path.stat()
    path.rename(kept)
    checkpoints.write(path.parent, path.stem, seed=99).rename(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    try:
        yield
    finally:
        kept.replace(path)


def _lora_for_flux() -> dict[str, torch.Tensor]:
    dice = torch.Generator().manual_seed(5)
    key = "diffusion_model.double_blocks.0.img_attn.proj"
    return {
        f"{key}.lora_down.weight": torch.randn(4, 256, generator=dice) * 0.1,
        f"{key}.lora_up.weight": torch.randn(256, 4, generator=dice) * 0.1,
    }
