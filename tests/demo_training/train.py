"""Trains the demo model from nothing on drawn pictures: rectified flow, AdamW, an average of the weights.

    python -m tests.demo_training.train --out cp_demo_flux.safetensors --minutes 60 --seed 0

Writes --out again and again while it runs (the averaged weights so far), beside it the state to resume from and a
grid of samples. The shipped model was trained in stages, each with --resume --anew on the one before; the first ones
drew with freer placement than subjects.py now has, so one run of this script makes a like model, not the same file.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from parallel_runtime.demo import HEADS, transformer, words_and_pictures
from parallel_runtime.demo.words_and_pictures import WIDTH, encode

from . import fitting
from .draw import draw
from .sample import Evaluate, euler
from .subjects import any_picture, any_wording

ARCHITECTURE = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 1,
    "num_single_layers": 4,
    "attention_head_dim": 128,
    "num_attention_heads": HEADS,
    "joint_attention_dim": WIDTH,
    "pooled_projection_dim": WIDTH,
    "guidance_embeds": False,
}
SIZES = [(128, 128)] * 24 + [
    (96, 96), (96, 128), (128, 96), (128, 160), (160, 128), (128, 192), (192, 128), (160, 160), (192, 192), (256, 256),
]  # fmt: skip
TOKENS = 1024  # image tokens per batch: 16 pictures of 128x128
WARMUP, AVERAGE, DROPPED = 200, 0.998, 0.1
GRID = [
    "a red circle", "a blue square", "a yellow triangle on a purple background", "a green star",
    "an orange cross on a black background", "a purple ring", "a pink heart on a blue background", "a white diamond",
]  # fmt: skip
log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TrainingRun:
    """Everything a resumed run needs."""

    model: FluxTransformer2DModel
    evaluate: Evaluate
    average: dict[str, Tensor]
    optimizer: torch.optim.Optimizer
    rng: random.Random
    step: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)


def start(seed: int) -> TrainingRun:
    """An untrained run; every block begins as the identity."""
    torch.manual_seed(seed)
    model = FluxTransformer2DModel(**ARCHITECTURE)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ("norm" in name or name == "proj_out"):
            torch.nn.init.zeros_(module.weight)
            torch.nn.init.zeros_(module.bias)
    average = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.99), weight_decay=0.01)
    evaluate = partial(transformer.evaluate, model)
    return TrainingRun(model=model, evaluate=evaluate, average=average, optimizer=optimizer, rng=random.Random(seed))


def batch(rng: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    """(latents in model space, cross_attn, pooled), all of one size and one wording, so of one length."""
    height, width = rng.choice(SIZES)
    wording = any_wording(rng)
    pairs = [any_picture(rng, wording, height, width) for _ in range(TOKENS * 256 // (height * width))]
    latents = fitting.encode(torch.stack([draw(picture, height, width) for picture, _ in pairs]))
    silent = rng.random() < DROPPED
    conds = [encode("" if silent else prompt) for _, prompt in pairs]
    cross, pooled = (torch.cat(parts) for parts in zip(*conds, strict=True))
    return (latents - words_and_pictures.SHIFT) * words_and_pictures.SCALE, cross, pooled


def loss(evaluate: Evaluate, latents: Tensor, cross: Tensor, pooled: Tensor) -> Tensor:
    """Rectified flow: the model names noise minus picture, most often where a picture takes shape (0.6 to 0.95)."""
    noise = torch.randn_like(latents)
    sigma = (0.8 + 1.2 * torch.randn(len(latents))).sigmoid()
    level = sigma[:, None, None, None]
    mixed = (1 - level) * latents + level * noise
    with torch.autocast("cpu", torch.bfloat16):
        guess = evaluate(mixed, sigma, {"c_crossattn": cross, "y": pooled})
    return ((guess.float() - noise + latents).square().mean((0, 2, 3)) * fitting.weights()).mean()


def advance(run: TrainingRun, rate: float) -> float:
    """One optimizer step; returns the loss."""
    for group in run.optimizer.param_groups:
        group["lr"] = rate
    loss_before = loss(run.evaluate, *batch(run.rng))
    loss_before.backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.step += 1
    keep = min(AVERAGE, (1 + run.step) / (10 + run.step))
    for name, tensor in run.model.state_dict().items():
        run.average[name].lerp_(tensor, 1 - keep)
    return loss_before.item()


def save(run: TrainingRun, out: Path, seed: int) -> None:
    """The averaged weights as a single-file checkpoint, the state to resume from, and a grid of samples."""
    weights = {key: value.bfloat16() for key, value in transformer.to_checkpoint(run.average).items()}
    about = {
        "format": "pt",
        "title": "CP Sampler demo model: coloured shapes",
        "license": "Trained from nothing on procedurally drawn pictures; same license as the repository it is in.",
        "seed": str(seed),
        "steps": str(run.step),
    }
    part = out.with_suffix(".part")
    save_file(weights, part, metadata=about)
    part.replace(out)
    state = {
        "model": run.model.state_dict(),
        "average": run.average,
        "optimizer": run.optimizer.state_dict(),
        "rng": run.rng.getstate(),
        "torch": torch.get_rng_state(),
        "step": run.step,
        "seconds": run.seconds,
    }
    torch.save(state, out.with_suffix(".state"))
    _grid(run, out.with_suffix(".png"))


def resume(run: TrainingRun, path: Path) -> None:
    """Continues where save left off."""
    state = torch.load(path, weights_only=True)
    run.model.load_state_dict(state["model"])
    run.average = state["average"]
    run.optimizer.load_state_dict(state["optimizer"])
    version, numbers, gauss = state["rng"]
    run.rng.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    run.step, run.seconds = state["step"], state["seconds"]


def train(run: TrainingRun, *, out: Path, seed: int, steps: int, minutes: float, rate: float) -> None:
    """Until the steps or the minutes are over, whichever is first; the learning rate falls to zero by then."""
    before, saved = time.monotonic() - run.seconds, run.seconds
    while (done := max(run.step / steps, run.seconds / 60 / minutes)) < 1:
        now = rate * min(1, (run.step + 1) / WARMUP) * (1 + math.cos(math.pi * done)) / 2
        run.losses = [*run.losses[-99:], advance(run, now)]
        run.seconds = time.monotonic() - before
        if run.step % 100 == 0:
            mean = sum(run.losses) / len(run.losses)
            log.info("step %d  %.0f s  loss %.4f  rate %.1e", run.step, run.seconds, mean, now)
        if run.seconds - saved > 150:
            save(run, out, seed)
            saved = run.seconds
    save(run, out, seed)


def _grid(run: TrainingRun, path: Path) -> None:
    trained = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    run.model.load_state_dict(run.average)
    generator = torch.Generator().manual_seed(1)
    tiles = [euler(run.evaluate, prompt, torch.randn(1, 16, 16, 16, generator=generator), steps=10) for prompt in GRID]
    run.model.load_state_dict(trained)
    rows = [torch.cat(tiles[i : i + 4], 2)[0] for i in range(0, len(tiles), 4)]
    Image.fromarray((torch.cat(rows) * 255).round().byte().numpy()).save(path)


def main() -> None:
    """The command line."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--steps", type=int, default=8000)
    arguments.add_argument("--minutes", type=float, default=math.inf)
    arguments.add_argument("--rate", type=float, default=1e-3)
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--resume", action="store_true")
    arguments.add_argument("--anew", action="store_true", help="with --resume: begin the schedule again")
    args = arguments.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(args.threads)
    run = start(args.seed)
    if not words_and_pictures.FILE.exists():
        rng = random.Random(args.seed)
        drawn = [any_picture(rng, any_wording(rng), 128, 128)[0] for _ in range(2000)]
        save_file(fitting.fit([draw(picture, 128, 128) for picture in drawn]), words_and_pictures.FILE)
    if args.resume:
        resume(run, args.out.with_suffix(".state"))
    if args.anew:
        run.step, run.seconds = 0, 0.0
    train(run, out=args.out, seed=args.seed, steps=args.steps, minutes=args.minutes, rate=args.rate)


if __name__ == "__main__":
    main()
