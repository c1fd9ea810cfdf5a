"""What patches cost in exactness: the demo model sampled in patches, and the exact picture of fewer steps that takes as
long, against the exact picture and against one of many steps.

    python -m tests.bench.patches [--steps 8 12 20] [--patches 2 4 8] [--warmup 1 4] [--samplers euler dpmpp_2m]
        [--pictures 4] [--many 100] [--json out.json]

In one process, in ComfyUI's python: what is computed does not depend on stages (tests/architectures/test_patches.py).
Pictures are of each prompt, `many` the steps of what is taken for true. Time is that of a pipeline's formula for two
stages and both prompts.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from parallel_runtime.architectures import architecture_of
from parallel_runtime.demo.words_and_pictures import encode
from parallel_runtime.request import EngineOptions
from parallel_runtime.specs import Parallelism

from ..comfyui.comfy import OUR_ROOT
from . import harness

MODEL = OUR_ROOT / "parallel_runtime" / "demo" / "models" / "cp_demo_flux.safetensors"
PROMPTS = ("a red circle on a white background", "a blue star on a yellow background")
SIDE, CFG, STAGES = 16, 2.5, 2
FLIGHTS = 2  # both prompts
COLUMNS = {"sampler": "{sampler}", "steps": "{steps}", "patches": "{patches}", "exact steps": "{warmup}",
           "apart from exact": "{apart:.3f}", "from true": "{off:.3f}", "as long: steps": "{fewer}",
           "as long, from true": "{fewer_off:.3f}"}  # fmt: skip


def main() -> None:
    options = harness.options(
        __doc__,
        steps=[8, 12, 20],
        patches=[2, 4, 8],
        warmup=[1, 4],
        samplers=["euler", "dpmpp_2m"],
        pictures=4,
        many=100,
    )
    if harness.is_rank():
        harness.answer(_rows(options))
    else:
        harness.report(harness.launch("patches", in_comfyui=True), COLUMNS, options.json)


@torch.inference_mode()
def _rows(options: argparse.Namespace) -> list[harness.Row]:
    from ..zoo import tiny

    tiny.start_comfyui()
    pictures = Pictures(options.pictures)
    rows = []
    for sampler in options.samplers:
        exact = cache(partial(pictures.sample, sampler))
        true = exact(options.many)
        for steps in options.steps:
            rows.append(_row(sampler, steps, 1, steps, exact(steps), exact(steps), true) | _as_long(steps, exact, true))
            for patches in options.patches:
                for warmup in options.warmup:
                    got = pictures.sample(sampler, steps, patches, warmup)
                    fewer = round(takes(steps, patches, warmup) / takes(1, 1, 1))
                    row = _row(sampler, steps, patches, warmup, got, exact(steps), true)
                    rows.append(row | _as_long(fewer, exact, true))
    return rows


def _row(sampler: str, steps: int, patches: int, warmup: int, got: Tensor, exact: Tensor, true: Tensor) -> harness.Row:
    return {"sampler": sampler, "steps": steps, "patches": patches, "warmup": warmup, "apart": apart(got, exact),
            "off": apart(got, true)}  # fmt: skip


def _as_long(steps: int, exact: Any, true: Tensor) -> harness.Row:
    return {"fewer": steps, "fewer_off": apart(exact(steps), true)}


def takes(steps: int, patches: int, warmup: int) -> float:
    """In evaluations of one stage that had all blocks: while the pipeline fills and empties, stages stand still."""
    flown = FLIGHTS * patches
    exact = min(steps, warmup if patches > 1 else steps)
    return exact * (FLIGHTS + STAGES - 1) / FLIGHTS + (steps - exact) * (flown + STAGES - 1) / flown


def apart(got: Tensor, want: Tensor) -> float:
    """Root of the mean square, in standard deviations of each picture; the mean of all pictures."""
    return float(((got - want).square().mean((1, 2, 3)) / want.var((1, 2, 3))).sqrt().mean())


class Pictures:
    """The demo model's, `count` of each prompt."""

    def __init__(self, count: int) -> None:
        import comfy.sd

        self._count = count
        self._model = comfy.sd.load_diffusion_model(str(MODEL))
        self._network = self._model.model.diffusion_model

    def sample(self, sampler: str, steps: int, patches: int = 1, warmup: int = 1) -> Tensor:
        """Latents [pictures, C, H, W]."""
        import comfy.sample

        from parallel_runtime.engine.comm.mesh import ContextMesh
        from parallel_runtime.engine.parallelize import parallelize, unparallelize
        from parallel_runtime.engine.split.streams import streams_of
        from parallel_runtime.worker.comfy_loop.sampling import with_pipefusion

        known = architecture_of(self._network)
        assert known is not None
        if patches > 1:
            parallelize(
                self._network,
                known.plan,
                ContextMesh(),
                Parallelism(pipeline_degree=STAGES, options=EngineOptions(token_patches=patches)),
            )
        model, streams = self._model.clone(), streams_of(self._network)
        pipefusion = None if streams is None else streams.pipefusion
        latent = torch.zeros(self._count, 16, SIDE, SIDE)
        noise, simple = comfy.sample.prepare_noise(latent, 7), "simple"
        sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), simple, steps)
        made, negative = [], _cond("")
        for prompt in PROMPTS:
            given = (model, noise, steps, CFG, sampler, simple, _cond(prompt), negative, latent)
            with with_pipefusion(pipefusion, model, sigmas, warmup) if pipefusion else nullcontext():
                made.append(comfy.sample.sample(*given, seed=7, disable_pbar=True))
        if patches > 1:
            unparallelize(self._network)
        return torch.cat(made)


def _cond(prompt: str) -> list[Any]:
    text, pooled = encode(prompt)
    return [[text, {"pooled_output": pooled}]]


if __name__ == "__main__":
    main()
