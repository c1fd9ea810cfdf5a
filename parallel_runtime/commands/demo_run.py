"""The whole path without ComfyUI and without downloads: two workers draw a picture, one worker checks it."""

import argparse
import sys
from collections.abc import Sequence

import torch
from PIL import Image
from tqdm import tqdm

from ..demo import HEADS, spec, words_and_pictures
from ..errors import ParallelError
from ..group.machines import checked_plan
from ..group.worker_group import Result, WorkerGroup
from ..jobs import DemoJob
from ..planning.network_stats import NetworkStats
from ..planning.run_plan import PlanInputs, RunPlan
from ..request import ParallelRequest
from ..specs import Parallelism, Placement

DrawnRun = tuple[RunPlan, Result]  # a row of the table


def main(options: argparse.Namespace) -> int:
    try:
        runs = draw(options)
    except (ParallelError, ValueError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    plan, drawn = runs[0]
    latent = drawn.value["samples"] / words_and_pictures.SCALE + words_and_pictures.SHIFT
    pixels = words_and_pictures.decode(latent)[0]
    picture = Image.fromarray((pixels * 255).round().to(torch.uint8).numpy())
    picture.resize((picture.width * 4, picture.height * 4), Image.Resampling.BICUBIC).save(options.out)
    if plan.placement.shared:
        print("The workers share one device, so several are slower than one: compare the results, not the times.")
    print(table(runs, options.steps))
    print(f"{options.prompt!r} drawn to {options.out.absolute()}")
    return 0


def draw(options: argparse.Namespace) -> list[DrawnRun]:
    """Returns the requested run, and the same on one worker."""
    gpus = torch.cuda.device_count()
    devices = options.devices or ("" if gpus > 1 else "cuda:0,cuda:0" if gpus else "")
    ring, ulysses = options.ring_degree, options.ulysses_degree
    if not ring and not ulysses and not options.devices:
        ulysses = 2
    request = ParallelRequest.of({"ring_degree": ring, "ulysses_degree": ulysses, "devices": devices})
    plan = checked_plan(PlanInputs(request=request, network=NetworkStats(heads=HEADS), gpus=gpus))
    generator = torch.Generator().manual_seed(options.seed)
    noise = torch.randn(1, words_and_pictures.CHANNELS, options.height // 8, options.width // 8, generator=generator)
    job = words_and_pictures.demo_job(options.prompt, noise, steps=options.steps, cfg=options.cfg)
    runs = [run(plan, job)]
    if plan.placement.world_size > 1:
        one = Placement(devices=plan.placement.devices[:1])
        runs.append(run(RunPlan(degrees=Parallelism(), placement=one), job))
    return runs


def run(plan: RunPlan, job: DemoJob) -> DrawnRun:
    placement, steps = plan.placement, len(job.sigmas) - 1
    print(f"starting {placement.world_size} worker(s) on {', '.join(placement.devices)} ...", flush=True)
    with WorkerGroup(placement) as group, tqdm(total=steps, unit="step") as bar:
        result = group.run(spec(), plan.degrees, job, on_step=lambda step, *_: bar.update(step + 1 - bar.n))
        bar.update(steps - bar.n)
    return plan, result


def table(runs: Sequence[DrawnRun], steps: int) -> str:
    """Returns a line a run; differences are of latents [1, 16, H/8, W/8], in their standard deviations."""
    single = runs[-1][1].value["samples"]
    lines = [f"{'degrees':<24}{'workers':>8}{'s/step':>10}{'total s':>10}{'largest difference':>21}"]
    for plan, result in runs:
        degrees = f"ring {plan.degrees.ring_degree} x ulysses {plan.degrees.ulysses_degree}"
        difference = ((result.value["samples"] - single).abs().max() / single.std()).item()
        times = f"{result.seconds / steps:>10.3f}{result.seconds:>10.2f}"
        lines.append(f"{degrees:<24}{plan.degrees.world_size:>8}{times}{difference:>21.1e}")
    return "\n".join(lines)
